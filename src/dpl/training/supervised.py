"""Training with true labels: cross-entropy against the DPL loss, for the paper's comparison in a supervised setting.

The paper names the data (CIFAR-10) and the network (ResNet-50) and nothing else, so the recipe is the usual one for
small images: SGD with momentum, a cosine schedule, random crops and flips. Every sample counts as confident, with its
label: L = L_DPL* + beta L_REG (Eq. 4 to 7). Accuracy is that of the last epoch: no epoch is chosen on the test images.
"""

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones import Normalized, create
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.data import ImageSet, batches, open_benchmark, unchanged
from dpl.memory import update_class_memory
from dpl.network.split import find_classifier, logits_of
from dpl.objectives import dpl_star, prototype_regularization
from dpl.streams import seed_hash
from dpl.streams.domain import whole_number
from dpl.training.folder import TrainFolder, opened
from dpl.training.record import check_same, session

__all__ = ["LOSSES", "EpochReport", "SupervisedResult", "SupervisedSpec", "train_supervised"]

LOSSES = ("ce", "dpl")
_PADDING = 4
_EVALUATION_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class SupervisedSpec:
    """One run; two of the same settings on the same machine end with the same weights."""

    loss: str
    """`ce` or `dpl`."""
    dataset: str = "cifar10"
    """A benchmark of small images with a training and a test split."""
    network: str = "resnet50"
    """As `dpl.backbones.create` takes it; a stem made for large images is replaced by one 3 x 3 convolution."""
    epochs: int = 200
    batch_size: int = 128
    lr: float = 0.1
    """Rate of SGD at the first epoch; it falls to zero along a cosine."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    temperature: float = 0.1
    """tau of the DPL loss."""
    memory_momentum: float = 0.9
    """eta of its memory."""
    reg_weight: float = 1.0
    """beta, the weight of its regulariser."""
    limit: int | None = None
    """Train and test on at most so many images; None: on all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise SettingError(f"loss={self.loss!r} is unknown. {did_you_mean(self.loss, LOSSES)}")
        for name, least in (("epochs", 1), ("batch_size", 2), ("seed", 0)):
            whole_number(name, getattr(self, name), least=least)
        if self.limit is not None:
            whole_number("limit", self.limit, least=2)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SettingError(f"lr={self.lr!r}: expected a learning rate above 0, such as 0.1")


@dataclass(frozen=True)
class EpochReport:
    """How a run stands after an epoch; accuracies in percent, on the test images."""

    epoch: int
    loss: float
    accuracy: float
    cosine_accuracy: float
    """With cosines to the prototypes as scores, which is what the DPL loss trains; logits have lengths and a bias."""
    seconds: float


@dataclass(frozen=True)
class SupervisedResult:
    """A finished run."""

    accuracy: float
    cosine_accuracy: float
    training_images: int
    test_images: int
    history: tuple[EpochReport, ...]


@dataclass(frozen=True)
class _Images:
    pixels: Tensor  # [N, 3, H, W], uint8
    labels: Tensor  # [N], int64

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.pixels[rows].to(device), self.labels[rows].to(device)


def train_supervised(
    spec: SupervisedSpec, *, data: str | os.PathLike[str], out: str | os.PathLike[str],
    on_epoch: Callable[[EpochReport], None] | None = None, device: str | None = None,
) -> SupervisedResult:  # fmt: skip
    """Train on the data set below `data` and keep everything in the folder `out`; a stopped run goes on by epochs."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    training, test, classes = _open(spec, data)
    asked = _describe(spec, training, test)
    with opened(out) as folder, torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        record = folder.description() or asked
        check_same(record, asked, folder.path)
        student = _Student(spec, classes, place)
        history = _restore(folder, student)
        if len(history) < spec.epochs:
            record["sessions"].append(session(len(history), place))
            folder.describe(record)
        for epoch in range(len(history), spec.epochs):
            history.append(student.epoch(epoch, training, test))
            folder.save({"history": [dataclasses.asdict(report) for report in history]}, student.state())
            if on_epoch is not None:
                on_epoch(history[-1])
        folder.write_best(student.weights())
        result = SupervisedResult(
            history[-1].accuracy, history[-1].cosine_accuracy, len(training), len(test), tuple(history)
        )
        folder.describe(record | {"result": dataclasses.asdict(result)})
        return result


def _open(spec: SupervisedSpec, data: str | os.PathLike[str]) -> tuple[_Images, _Images, int]:
    sets = [open_benchmark(spec.dataset, data, split=split)[split] for split in ("train", "test")]
    training, test = (_in_memory(image_set, spec.limit) for image_set in sets)
    return training, test, len(sets[0].classes)


def _in_memory(image_set: ImageSet, limit: int | None) -> _Images:
    """Return the images as they are, or a fixed random choice of them."""
    drawn = np.random.default_rng(0).permutation(len(image_set))[:limit]
    parts = list(batches(image_set, np.sort(drawn), unchanged(), _EVALUATION_BATCH, on_error="raise"))
    pixels = torch.cat([(part.images * 255).round().to(torch.uint8) for part in parts])
    return _Images(pixels, torch.cat([part.labels for part in parts]))


def _describe(spec: SupervisedSpec, training: _Images, test: _Images) -> dict[str, Any]:
    digest = hashlib.sha256()
    for images in (training, test):
        digest.update(images.pixels.numpy().tobytes())
        digest.update(images.labels.numpy().tobytes())
    data = {"images_sha256": digest.hexdigest(), "training": len(training), "test": len(test)}
    return {"settings": dataclasses.asdict(spec), "data": data, "sessions": [], "result": None}


def _restore(folder: TrainFolder, student: "_Student") -> list[EpochReport]:
    saved = folder.saved()
    if saved is None:
        return []
    manifest, tensors = saved
    student.load_state(tensors)
    return [EpochReport(**entry) for entry in manifest["history"]]


class _Student:
    """The network that learns, with its optimizer and the memory of the DPL loss."""

    def __init__(self, spec: SupervisedSpec, classes: int, device: torch.device) -> None:
        torch.manual_seed(spec.seed)
        self.spec, self.device = spec, device
        self.network = _for_small_images(create(spec.network, num_classes=classes))
        self.network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        head = self.network.get_submodule(find_classifier(self.network))
        if not isinstance(head, nn.Linear):
            raise SettingError(f"network={spec.network!r}: expected one with a linear classifier")
        self.head = head
        self.head.register_forward_pre_hook(lambda _layer, inputs: self._seen.append(inputs[0]))
        self._seen: list[Tensor] = []
        self.memory = self.head.weight.detach().clone()
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay
        )

    def epoch(self, epoch: int, training: _Images, test: _Images) -> EpochReport:
        """Go once through the training images, then test."""
        began = time.perf_counter()
        torch.manual_seed(seed_hash("epoch", self.spec.seed, epoch))
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr * (1 + math.cos(math.pi * epoch / self.spec.epochs)) / 2
        self.network.train()
        order = torch.randperm(len(training))
        size = min(self.spec.batch_size, len(order))
        starts = range(0, len(order) - size + 1, size)  # a short last batch would spoil the BN statistics
        total = torch.zeros((), device=self.device)
        for start in starts:
            total += self._update(*training.batch(order[start : start + size], self.device))
        loss = total.item() / len(starts)
        if not math.isfinite(loss):
            raise SettingError(f"lr={self.spec.lr}: the loss is {loss} in epoch {epoch}; lower the learning rate")
        return EpochReport(epoch, loss, *self.accuracies(test), time.perf_counter() - began)

    def _update(self, pixels: Tensor, labels: Tensor) -> Tensor:
        loss = self._loss(_augmented(pixels), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        logits, features = self._forward(images)
        if self.spec.loss == "ce":
            return F.cross_entropy(logits, labels)
        spec, prototypes = self.spec, self.head.weight
        self.memory = update_class_memory(self.memory, features.detach(), labels, spec.memory_momentum)
        contrast = dpl_star(features, prototypes, labels, spec.temperature)
        return contrast + spec.reg_weight * prototype_regularization(prototypes, self.memory, spec.temperature)

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, C] and the features [B, d] that the classifier was given."""
        self._seen.clear()
        logits = logits_of(self.network(images.contiguous(memory_format=torch.channels_last)))
        return logits, self._seen.pop()

    @torch.inference_mode()
    def accuracies(self, images: _Images) -> tuple[float, float]:
        """Return the accuracy in percent by logits, and by cosines."""
        self.network.eval()
        correct = torch.zeros(2, device=self.device)
        for start in range(0, len(images), _EVALUATION_BATCH):
            rows = torch.arange(start, min(start + _EVALUATION_BATCH, len(images)))
            pixels, labels = images.batch(rows, self.device)
            logits, features = self._forward(pixels / 255)
            cosines = F.normalize(features, dim=1) @ F.normalize(self.head.weight, dim=1).T
            correct += torch.stack([(scores.argmax(dim=1) == labels).sum() for scores in (logits, cosines)])
        by_logits, by_cosines = (100 * correct / len(images)).tolist()
        return by_logits, by_cosines

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the network's state under its own names."""
        inner = self.network.network if isinstance(self.network, Normalized) else self.network
        return {name: value.detach().cpu().clone().contiguous() for name, value in inner.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Return all that the next epoch depends on."""
        tensors = {f"network.{name}": value for name, value in self.weights().items()}
        for name, parameter in self.network.named_parameters():
            velocity = self.optimizer.state[parameter].get("momentum_buffer")
            if velocity is not None:
                tensors[f"velocity.{name}"] = velocity.detach().cpu().clone().contiguous()
        return tensors | {"memory": self.memory.cpu().clone()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        inner = self.network.network if isinstance(self.network, Normalized) else self.network
        try:
            inner.load_state_dict({name: tensors[f"network.{name}"] for name in inner.state_dict()})
            self.memory = tensors["memory"].to(self.device)
        except (KeyError, RuntimeError) as error:
            raise DataError(f"the saved state does not fit the network: {error}; begin the run again") from error
        for name, parameter in self.network.named_parameters():
            if f"velocity.{name}" in tensors:
                velocity = torch.empty_like(parameter).copy_(tensors[f"velocity.{name}"])
                self.optimizer.state[parameter] = {"momentum_buffer": velocity.detach()}


def _for_small_images(network: nn.Module) -> nn.Module:
    """Replace a stem that would shrink 32 pixels to 8 before the first block: 7 x 7 with stride 2, then pooling."""
    inner = network.network if isinstance(network, Normalized) else network
    stem, pooling = getattr(inner, "conv1", None), getattr(inner, "maxpool", None)
    if isinstance(stem, nn.Conv2d) and stem.kernel_size == (7, 7) and pooling is not None:
        inner.conv1 = nn.Conv2d(stem.in_channels, stem.out_channels, 3, padding=1, bias=stem.bias is not None)
        inner.maxpool = nn.Identity()
    return network


def _augmented(pixels: Tensor) -> Tensor:
    """Return random crops of the padded images, half of them flipped, as floats; draws come from torch's generator."""
    count, _, height, width = pixels.shape
    padded = F.pad(pixels, (_PADDING,) * 4)
    device = pixels.device
    top, left = torch.randint(0, 2 * _PADDING + 1, (2, count, 1)).to(device)
    columns = torch.arange(width, device=device).expand(count, width)
    flipped = (torch.rand(count, 1) < 0.5).to(device)
    columns = torch.where(flipped, columns.flip(1), columns) + left
    rows = torch.arange(height, device=device) + top  # [B, H]
    cut = padded[torch.arange(count, device=device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2) / 255  # [B, H, W, 3] -> [B, 3, H, W]
