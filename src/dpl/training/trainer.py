"""The network that learns: how it starts, one update, its accuracy, and its state as tensors."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones import Normalized, create, load_weights
from dpl.core.errors import DataError, ModelError, SnapshotCorrupt
from dpl.data import Batch
from dpl.network.split import find_classifier, logits_of
from dpl.training.parallel import Parallel
from dpl.training.spec import TrainSpec
from dpl.training.team import Team

__all__ = ["Learner"]


class Learner:
    """A network, its Adam and the device they live on.

    All is kept in the channels-last layout, in which convolutions and BatchNorm are up to twice as fast on a CPU.
    With a team, each process learns from its rows of a batch, and all hold the network that one would.
    """

    def __init__(self, spec: TrainSpec, classes: int, device: torch.device, team: Team | None = None) -> None:
        torch.manual_seed(spec.seed)
        self.network = create(spec.network, num_classes=classes)
        self.fresh_head = spec.weights is None or not _load(self.network, spec.weights)
        _check_runs(self.network, spec, classes)
        self.network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = device
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=spec.lr)
        self.team = team
        self.parallel = None if team is None else Parallel(self.network, team)

    def update(self, batch: Batch, seed: int) -> float:
        """Take one step on a batch and return its loss; `seed` feeds the layers that draw at random, as dropout."""
        torch.manual_seed(seed if self.team is None else seed + self.team.rank)
        self.network.train()
        loss = self._loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item() if self.team is None else self.team.add(loss).item() / self.team.size

    def _loss(self, batch: Batch) -> Tensor:
        images, labels = self._images(batch), batch.labels.to(self.device)
        if self.parallel is None:
            return F.cross_entropy(logits_of(self.network(images)), labels)
        logits, share = self.parallel(images)
        return F.cross_entropy(logits, labels) * share

    @torch.inference_mode()
    def accuracy(self, batches: Iterable[Batch]) -> float:
        """Return the share of images that are classified correctly, in percent; of the images of all processes."""
        self.network.eval()
        predict: Callable[[Tensor], Tensor] = self.network if self.parallel is None else self.parallel.predict
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)  # correct, seen
        for batch in batches:
            predicted = logits_of(predict(self._images(batch))).argmax(dim=1)
            counts[0] += (predicted == batch.labels.to(self.device)).sum()
            counts[1] += len(batch)
        correct, seen = (counts if self.team is None else self.team.add(counts)).tolist()
        return float(100.0 * correct / seen)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the network's state, under its own names: the normalisation in front leaves no trace."""
        return {name: _plain(value) for name, value in _inner(self.network).state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Return all that the next update depends on: weights, buffers and Adam's moments."""
        tensors = {f"network.{name}": value for name, value in self.weights().items()}
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = _plain(value)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned."""
        try:
            own = {name: tensors[f"network.{name}"] for name in _inner(self.network).state_dict()}
            _inner(self.network).load_state_dict(own)
            for name, parameter in self.network.named_parameters():
                names = {key: f"optimizer.{name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
                if names["step"] in tensors:  # a parameter that the network does not use has no moments
                    moments = {key: _laid_out(tensors[full], parameter) for key, full in names.items()}
                    self.optimizer.state[parameter] = moments
        except (KeyError, RuntimeError) as error:
            raise SnapshotCorrupt(f"the saved state does not fit the network: {error}") from error

    def _images(self, batch: Batch) -> Tensor:
        return batch.images.to(self.device, memory_format=torch.channels_last)


def _inner(network: nn.Module) -> nn.Module:
    return network.network if isinstance(network, Normalized) else network


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()


def _laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a saved moment in its parameter's memory layout, on which the last bit of an update may depend."""
    return value if value.ndim == 0 else torch.empty_like(parameter).copy_(value).detach()


def _load(network: nn.Module, path: str | Path) -> bool:
    """Load a checkpoint, and its head if that fits too; return whether it did. All other tensors must fit."""
    inner = _inner(network)
    report = load_weights(network, path, strict=False)
    try:
        head = find_classifier(inner)
    except ModelError:  # no linear layer: nothing can be taken for a head that may differ
        head = "-"
    unmatched = (*report.missing, *report.unexpected, *report.mismatched)
    strange = [name for name in unmatched if not name.startswith(f"{head}.")]
    if strange:
        raise DataError(
            f"weights={path}: {len(strange)} tensors beside the head ({head}) do not fit the network, as "
            f"{', '.join(strange[:3])}; give the name of the network that was trained"
        )
    if unmatched:
        _begin_anew(inner.get_submodule(head))
    return not unmatched


def _begin_anew(head: nn.Module) -> None:
    """Give a new head PyTorch's own start, as DomainBed does; some networks bring one of far larger weights."""
    if isinstance(head, nn.Linear) and "weight" in dict(head.named_parameters()):  # not if it is weight-normed
        head.reset_parameters()


@torch.inference_mode()
def _check_runs(network: nn.Module, spec: TrainSpec, classes: int) -> None:
    """Try two blank images, so that a size that does not suit the network is told before anything is written."""
    try:
        logits = logits_of(network.eval()(torch.zeros(2, 3, spec.size, spec.size)))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(f"network={spec.network} cannot take images of {spec.size} pixels ({error})") from error
    if logits.shape != (2, classes):
        raise ModelError(f"network={spec.network} gives logits {list(logits.shape)}; expected [2, {classes}]")
