"""Training of a source model: draw, update, validate, keep the best, save; a stopped run resumes."""

import math
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dpl.backbones import create, load_weights
from dpl.backbones.normalise import bare
from dpl.core.errors import DataError, ModelError, SettingError
from dpl.data import Batch, batches, square, training, training_batches
from dpl.network.split import guess_classifier, logits_of
from dpl.streams import seed_hash
from dpl.training.distributed import ALONE, ProcessGroup, process_group
from dpl.training.run import Record, RunFolder, Trainer, open_run
from dpl.training.sources import Sources, TrainSpec, open_sources

__all__ = ["SourceTrainer", "TrainResult", "train"]

OnStep = Callable[[int, float, float], None]  # the step from 0, its loss, the last validation accuracy in percent


@dataclass(frozen=True)
class TrainResult:
    """A finished run; accuracies are in percent, on the held-out images of the source domains."""

    weights: Path  # the checkpoint with the highest mean accuracy
    step: int  # after which it was taken, counted from 0
    mean: float
    validation: dict[str, float]
    seconds: float  # without steps that were lost when a run was killed
    history: list[Record]


def train(
    spec: TrainSpec,
    *,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    on_step: OnStep | None = None,
    workers: int = 2,
    device: str | None = None,
) -> TrainResult:
    """Train a source model on the benchmark below `data` and keep everything about it in the folder `out`.

    A stopped run resumes after its last validation and ends with exactly the same weights. `workers` threads read
    images and do not change the result. `device` defaults to a GPU if there is one. `on_step` gets each step, its loss
    and the last validation accuracy.

    Under `torchrun`, all processes share each batch and see `out`; only the first one writes there and calls `on_step`.
    """
    with process_group(device) as group:
        sources = open_sources(spec, data)
        devices = [group.device] if group.device.type == "cuda" else []
        with open_run(out, sources.record, group) as folder, torch.random.fork_rng(devices=devices):
            trainer = SourceTrainer(spec, sources, group, workers)
            folder.resume(trainer)
            trainer.run(folder, on_step if folder.writes else None)
            best, seconds = trainer.best(), trainer.history[-1]["seconds"]
            folder.finish(best | {"seconds": seconds})
    return TrainResult(folder.best, best["step"], best["mean"], best["validation"], seconds, trainer.history)


class SourceTrainer(Trainer):
    """A source model under Adam. In a process group, each process trains on its rows of a batch."""

    def __init__(self, spec: TrainSpec, sources: Sources, group: ProcessGroup = ALONE, workers: int = 0) -> None:
        torch.manual_seed(spec.seed)
        network = create(spec.network, num_classes=len(sources.classes))
        if spec.weights is not None:
            _load(network, spec.weights)
        _check_runs(network, spec, len(sources.classes))
        super().__init__(network, group.device, partial(torch.optim.Adam, lr=spec.lr))
        self.spec, self.sources, self.group, self.workers = spec, sources, group, workers
        self._rows = spec.per_domain * len(sources.training)  # of a batch, in all processes
        group.join_statistics(self.network)

    def best(self) -> Record:
        """Return the entry with the highest mean accuracy; of equals the earliest."""
        return max(self.history, key=lambda entry: float(entry["mean"]))

    def run(self, folder: RunFolder, on_step: OnStep | None) -> None:
        """Take the steps after the last validation."""
        spec, total = self.spec, 0.0
        first = self.history[-1]["step"] + 1 if self.history else 0
        if first == spec.steps:
            return
        folder.begin_session(first, self, processes=self.group.size)
        all_batches = training_batches(
            list(self.sources.training.values()), training(spec.size), per_domain=spec.per_domain, seed=spec.seed,
            start_step=first, rows=self.group.rows(self._rows), workers=self.workers,
        )  # fmt: skip
        with closing(all_batches) as drawn:
            for step, batch in zip(range(first, spec.steps), drawn, strict=False):
                loss = self.update(step, batch)
                total += loss
                if step % spec.eval_every == 0 or step == spec.steps - 1:
                    measured = {"step": step, "loss": total / (step + 1 - first), **self._validate()}
                    folder.save(self, measured)
                    total, first = 0.0, step + 1
                if on_step is not None:
                    on_step(step, loss, self.history[-1]["mean"])

    def update(self, step: int, batch: Batch) -> float:
        """Take a step on a batch and return its loss."""
        torch.manual_seed(seed_hash("step", self.spec.seed, step) + self.group.rank)  # for layers such as dropout
        self.network.train()
        images = batch.images.to(self.device, memory_format=torch.channels_last)
        own = F.cross_entropy(logits_of(self.network(images)), batch.labels.to(self.device))
        own = own * (len(images) / self._rows)
        own.backward()  # type: ignore[no-untyped-call]
        self.group.sum_gradients(self.network)
        self.optimizer.apply()
        loss = self.group.sum(own.detach()).item()
        if not math.isfinite(loss):
            raise SettingError(f"lr={self.spec.lr}: the loss is {loss} at step {step}; lower the learning rate")
        return loss

    @torch.inference_mode()
    def _validate(self) -> Record:
        """Return the accuracy in percent of each source domain, and their mean; each process contributes its rows."""
        self.network.eval()
        accuracies: dict[str, float] = {}
        for name, images in self.sources.validation.items():
            own = np.arange(len(images))[self.group.rows(len(images))]
            correct = torch.zeros((), dtype=torch.int64, device=self.device)
            for batch in batches(images, own, square(self.spec.size), 64, workers=self.workers, on_error="raise"):
                shown = batch.images.to(self.device, memory_format=torch.channels_last)
                correct += (logits_of(self.network(shown)).argmax(dim=1) == batch.labels.to(self.device)).sum()
            accuracies[name] = float(100.0 * self.group.sum(correct).item() / len(images))
        return {"mean": sum(accuracies.values()) / len(accuracies), "validation": accuracies}


def _load(network: nn.Module, path: str | Path) -> None:
    """Load a checkpoint, and its head if that fits too. All other tensors must fit."""
    inner = bare(network)
    report = load_weights(network, path, strict=False)
    head = guess_classifier(inner) or "-"  # without a linear layer no tensor may differ
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


@torch.inference_mode()
def _check_runs(network: nn.Module, spec: TrainSpec, classes: int) -> None:
    """Run two blank images, so that an unsuitable size is reported before anything is written."""
    try:
        logits = logits_of(network.eval()(torch.zeros(2, 3, spec.size, spec.size)))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(f"network={spec.network} cannot take images of {spec.size} pixels ({error})") from error
    if logits.shape != (2, classes):
        raise ModelError(f"network={spec.network} gives logits {list(logits.shape)}; expected [2, {classes}]")
