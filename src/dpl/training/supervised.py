"""Training with true labels: cross-entropy against the DPL loss, for the paper's comparison in a supervised setting.

The paper names the data (CIFAR-10) and the network (ResNet-50) and nothing else, so the recipe is the usual one for
small images: SGD with momentum, a cosine schedule, random crops and flips. Every sample is used, with its true
label: L = L_DPL* + beta L_REG (Eq. 4 to 7). The accuracy is that of the last epoch: none is chosen on the test set.
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones import create
from dpl.backbones.normalise import bare
from dpl.core.errors import SettingError
from dpl.core.extras import choose_device
from dpl.core.numerics import cosines
from dpl.core.settings import Checked, setting
from dpl.data import ImageSet, batches, open_benchmark, unchanged
from dpl.memory import update_class_memory
from dpl.network.split import find_classifier, logits_of
from dpl.objectives import dpl_star, prototype_regularization
from dpl.streams import seed_hash
from dpl.training.run import Record, Trainer, open_run

__all__ = ["LOSSES", "SupervisedSpec", "train_supervised"]

Loss = Literal["ce", "dpl"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
_PADDING = 4
_EVALUATION_BATCH = 500
Images = tuple[Tensor, Tensor]  # pixels [N, 3, H, W] (uint8), labels [N]


@dataclass(frozen=True, kw_only=True)
class SupervisedSpec(Checked):
    """One run; two with the same settings on the same machine end with the same weights."""

    loss: Loss  # cross-entropy or the DPL loss
    dataset: str = setting("cifar10", "benchmark of small images with a training and a test split")
    network: str = setting("resnet50", "name of the network; its stem is replaced if made for large images")
    epochs: int = setting(200, "number of epochs", low=1)
    batch_size: int = setting(128, "images in a batch", low=2)
    lr: float = setting(0.1, "learning rate of SGD in the first epoch; it decays to zero along a cosine", low=1e-12)
    momentum: float = setting(0.9, "momentum of SGD", low=0, high=1)
    weight_decay: float = setting(5e-4, "weight decay of SGD", low=0)
    temperature: float = setting(0.1, "tau of the DPL loss", low=1e-4)
    memory_momentum: float = setting(0.9, "eta of its memory", low=0, high=1)
    reg_weight: float = setting(1.0, "beta, the weight of its regulariser", low=0)
    limit: int | None = setting(None, "largest number of training and of test images; all if not given", low=2)
    seed: int = setting(0, "seed of weights, order and augmentation", low=0)


def train_supervised(
    spec: SupervisedSpec, *, data: str | os.PathLike[str], out: str | os.PathLike[str],
    on_epoch: Callable[[Record], None] | None = None, device: str | None = None,
) -> list[Record]:  # fmt: skip
    """Train into the folder `out`, where a stopped run resumes; return what was measured after each epoch."""
    place = choose_device(device)
    sets = [open_benchmark(spec.dataset, data, split=split)[split] for split in ("train", "test")]
    training, test = (_in_memory(image_set, spec.limit) for image_set in sets)
    digest = hashlib.sha256()
    for tensor in (*training, *test):
        digest.update(tensor.numpy().tobytes())
    noted = {"images_sha256": digest.hexdigest(), "training": len(training[1]), "test": len(test[1])}
    asked: Record = {"settings": dataclasses.asdict(spec), "data": noted, "sessions": [], "result": None}
    devices = [place] if place.type == "cuda" else []
    with open_run(out, asked) as folder, torch.random.fork_rng(devices=devices):
        trainer = SupervisedTrainer(spec, len(sets[0].classes), place)
        folder.resume(trainer)
        history = trainer.history
        if len(history) < spec.epochs:
            folder.begin_session(len(history), trainer)
        for epoch in range(len(history), spec.epochs):
            folder.save(trainer, trainer.epoch(epoch, training, test))
            if on_epoch is not None:
                on_epoch(history[-1])
        folder.finish(history[-1])
        return history


def _in_memory(image_set: ImageSet, limit: int | None) -> Images:
    """Return all images, or a fixed random subset of them."""
    drawn = np.random.default_rng(0).permutation(len(image_set))[:limit]
    parts = list(batches(image_set, np.sort(drawn), unchanged(), _EVALUATION_BATCH, on_error="raise"))
    pixels = torch.cat([(part.images * 255).round().to(torch.uint8) for part in parts])
    return pixels, torch.cat([part.labels for part in parts])


class SupervisedTrainer(Trainer):
    """A network under SGD, with the memory of the DPL loss."""

    memory: Tensor

    def __init__(self, spec: SupervisedSpec, classes: int, device: torch.device) -> None:
        torch.manual_seed(spec.seed)
        network = _for_small_images(create(spec.network, num_classes=classes))
        sgd = partial(torch.optim.SGD, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
        super().__init__(network, device, sgd)
        self.spec = spec
        self.head: Any = self.network.get_submodule(find_classifier(self.network))
        self._inputs: dict[nn.Module, tuple[Tensor, ...]] = {}
        self.head.register_forward_pre_hook(self._inputs.__setitem__)
        self.declare(memory=self.head.weight.detach().clone())

    def epoch(self, epoch: int, training: Images, test: Images) -> Record:
        """Train on all training images once, then test; return the loss and the accuracies in percent."""
        torch.manual_seed(seed_hash("epoch", self.spec.seed, epoch))
        self.optimizer.scale_lr((1 + math.cos(math.pi * epoch / self.spec.epochs)) / 2)
        self.network.train()
        order = torch.randperm(len(training[1]))
        size = min(self.spec.batch_size, len(order))
        total, steps = torch.zeros((), device=self.device), len(order) // size
        for rows in torch.split(order[: steps * size], size):  # a short last batch would have poor BatchNorm statistics
            pixels, labels = (tensor[rows].to(self.device) for tensor in training)
            loss = self._loss(_augmented(pixels), labels)
            self.optimizer.step(loss)
            total += loss.detach()
        mean = total.item() / steps
        if not math.isfinite(mean):
            raise SettingError(f"lr={self.spec.lr}: the loss is {mean} in epoch {epoch}; lower the learning rate")
        return {"epoch": epoch, "loss": mean, **self._test(test)}

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        logits, features = self._forward(images)
        if self.spec.loss == "ce":
            return F.cross_entropy(logits, labels)
        spec, prototypes = self.spec, self.head.weight
        self.memory = update_class_memory(self.memory, features.detach(), labels, spec.memory_momentum)
        contrast = dpl_star(features, prototypes, labels, spec.temperature)
        return contrast + spec.reg_weight * prototype_regularization(prototypes, self.memory, spec.temperature)

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B, C] and the features [B, d] before the classifier."""
        logits = logits_of(self.network(images.contiguous(memory_format=torch.channels_last)))
        return logits, self._inputs.pop(self.head)[0]

    @torch.inference_mode()
    def _test(self, images: Images) -> dict[str, float]:
        """Return the accuracy in percent, also with cosines to the prototypes as scores: the DPL loss trains those."""
        self.network.eval()
        correct = torch.zeros(2, device=self.device)
        for pixels, labels in zip(*(torch.split(tensor, _EVALUATION_BATCH) for tensor in images), strict=True):
            logits, features = self._forward(pixels.to(self.device) / 255)
            by_angle = cosines(features, self.head.weight)
            found = torch.stack([scores.argmax(dim=1) for scores in (logits, by_angle)])
            correct += (found == labels.to(self.device)).sum(dim=1)
        return dict(zip(("accuracy", "cosine_accuracy"), (100 * correct / len(images[1])).tolist(), strict=True))


def _for_small_images(network: nn.Module) -> nn.Module:
    """Replace a stem for large images: 7 x 7 with stride 2 and pooling would reduce 32 pixels to 8."""
    inner = bare(network)
    stem, pooling = getattr(inner, "conv1", None), getattr(inner, "maxpool", None)
    if isinstance(stem, nn.Conv2d) and stem.kernel_size == (7, 7) and pooling is not None:
        inner.conv1 = nn.Conv2d(stem.in_channels, stem.out_channels, 3, padding=1, bias=stem.bias is not None)
        inner.maxpool = nn.Identity()
    return network


def _augmented(pixels: Tensor) -> Tensor:
    """Return random crops of the padded images, half of them flipped, as floats; draws come from torch's generator."""
    count, _, height, width = pixels.shape
    corners = torch.randint(0, 2 * _PADDING + 1, (2, count)).T.tolist()
    flipped = (torch.rand(count, 1, 1, 1) < 0.5).to(pixels.device)
    padded = F.pad(pixels, (_PADDING,) * 4)
    cut = torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, corners, strict=True)])
    return torch.where(flipped, cut.flip(3), cut) / 255
