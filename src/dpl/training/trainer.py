"""A network in training: its start, one update, its accuracy, and its state as tensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones import create, load_weights
from dpl.backbones.normalise import bare
from dpl.core.errors import DataError, ModelError, SnapshotCorrupt
from dpl.core.optimizer import laid_out_like
from dpl.data import Batch
from dpl.network.split import find_classifier, logits_of
from dpl.training.distributed import DistributedNetwork, ProcessGroup
from dpl.training.run_folder import Record, RunFolder
from dpl.training.sources import TrainSpec

__all__ = ["SourceTrainer", "Trainer"]


class Trainer:
    """A network on its device, and its optimizer.

    Both are in the channels-last layout, in which convolutions and BatchNorm are up to twice as fast on a CPU.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network = network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = device
        self.optimizer: torch.optim.Optimizer

    def step(self, loss: Tensor) -> None:
        """Update the network."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the network's state under its own names, without the normalisation layer."""
        return {name: _stored(value) for name, value in bare(self.network).state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on: weights, buffers and the optimizer's state."""
        tensors = {f"network.{name}": value for name, value in self.weights().items()}
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if value is not None:
                    tensors[f"optimizer.{name}.{key}"] = _stored(value)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        inner, parameters = bare(self.network), dict(self.network.named_parameters())
        try:
            inner.load_state_dict({name: tensors[f"network.{name}"] for name in inner.state_dict()})
            for full, value in tensors.items():
                if full.startswith("optimizer."):
                    name, _, key = full.removeprefix("optimizer.").rpartition(".")
                    self.optimizer.state[parameters[name]][key] = laid_out_like(parameters[name], value)
        except (KeyError, RuntimeError) as error:
            raise SnapshotCorrupt(f"the saved state does not fit the network: {error}") from error

    def restore(self, folder: RunFolder) -> Record:
        """Continue from the last save; return what was saved beside the tensors, nothing for a new run."""
        saved = folder.read_state()
        if saved is None:
            return {}
        notes, tensors = saved
        self.load_state(tensors)
        return notes


class SourceTrainer(Trainer):
    """A source model under Adam. In a process group, each process trains on its rows of a batch."""

    def __init__(self, spec: TrainSpec, classes: int, device: torch.device, group: ProcessGroup | None = None) -> None:
        torch.manual_seed(spec.seed)
        network = create(spec.network, num_classes=classes)
        self.fresh_head = spec.weights is None or not _load(network, spec.weights)
        _check_runs(network, spec, classes)
        super().__init__(network, device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=spec.lr)
        self.group = group
        self.distributed = None if group is None else DistributedNetwork(self.network, group)

    def update(self, batch: Batch, seed: int) -> float:
        """Take one step on a batch and return its loss; `seed` is for random layers such as dropout."""
        torch.manual_seed(seed if self.group is None else seed + self.group.rank)
        self.network.train()
        images, labels = self._images(batch), batch.labels.to(self.device)
        if self.distributed is None:
            logits, factor = logits_of(self.network(images)), 1.0
        else:
            logits, factor = self.distributed(images)
        loss = F.cross_entropy(logits, labels) * factor
        self.step(loss)
        return loss.item() if self.group is None else self.group.sum(loss).item() / self.group.size

    @torch.inference_mode()
    def accuracy(self, batches: Iterable[Batch]) -> float:
        """Return the accuracy in percent over the images of all processes."""
        self.network.eval()
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)  # correct, seen
        for batch in batches:
            predicted = logits_of(self.network(self._images(batch))).argmax(dim=1)
            counts[0] += (predicted == batch.labels.to(self.device)).sum()
            counts[1] += len(batch)
        correct, seen = (counts if self.group is None else self.group.sum(counts)).tolist()
        return float(100.0 * correct / seen)

    def _images(self, batch: Batch) -> Tensor:
        return batch.images.to(self.device, memory_format=torch.channels_last)


def _stored(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()


def _load(network: nn.Module, path: str | Path) -> bool:
    """Load a checkpoint, and its head if that fits too; return whether it did. All other tensors must fit."""
    inner = bare(network)
    report = load_weights(network, path, strict=False)
    try:
        head = find_classifier(inner)
    except ModelError:  # without a linear layer no tensor may differ
        head = "-"
    unmatched = (*report.missing, *report.unexpected, *report.mismatched)
    others = [name for name in unmatched if not name.startswith(f"{head}.")]
    if others:
        raise DataError(
            f"weights={path}: {len(others)} tensors beside the head ({head}) do not fit the network, such as "
            f"{', '.join(others[:3])}; give the name of the network that was trained"
        )
    layer = inner.get_submodule(head) if unmatched else None
    if isinstance(layer, nn.Linear) and "weight" in dict(layer.named_parameters()):  # not if it is weight-normed
        layer.reset_parameters()  # as DomainBed does; some networks start with far larger weights
    return not unmatched


@torch.inference_mode()
def _check_runs(network: nn.Module, spec: TrainSpec, classes: int) -> None:
    """Run two blank images, so that an unsuitable size is reported before anything is written."""
    try:
        logits = logits_of(network.eval()(torch.zeros(2, 3, spec.size, spec.size)))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(f"network={spec.network} cannot take images of {spec.size} pixels ({error})") from error
    if logits.shape != (2, classes):
        raise ModelError(f"network={spec.network} gives logits {list(logits.shape)}; expected [2, {classes}]")
