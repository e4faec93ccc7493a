"""The training loop: draw, update, validate, keep the best, save; a stopped run resumes."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dpl.backbones import create, load_weights
from dpl.backbones.normalise import bare
from dpl.core.errors import DataError, ModelError, SettingError
from dpl.core.extras import choose_device
from dpl.core.files import file_sha256
from dpl.core.settings import whole_number
from dpl.data import Batch, ImageSet, batches, square, training, training_batches
from dpl.network.split import guess_classifier, logits_of
from dpl.streams import seed_hash
from dpl.training.distributed import ALONE, DistributedNetwork, ProcessGroup, process_group
from dpl.training.run import Record, RunFolder, Trainer, open_run
from dpl.training.sources import Sources, TrainSpec, open_sources

__all__ = ["SourceTrainer", "StepReport", "TrainResult", "train"]


@dataclass(frozen=True)
class StepReport:
    """Progress after one step; `mean` is the last validation accuracy in percent, None before the first."""

    step: int
    steps: int
    loss: float
    mean: float | None


OnStep = Callable[[StepReport], None]


@dataclass(frozen=True)
class TrainResult:
    """A finished run; accuracies are in percent, on the held-out images of the source domains."""

    weights: Path
    """The checkpoint with the highest mean accuracy."""
    step: int
    """The step after which it was taken, counted from 0."""
    mean: float
    validation: dict[str, float]
    seconds: float
    """Time spent, without steps that were lost when a run was killed."""
    history: list[Record] = field(repr=False)


@dataclass
class _Progress:
    """The saved state of a run apart from the network."""

    step: int = 0  # the next one
    loss_sum: float = 0.0  # since the last validation
    loss_count: int = 0
    seconds: float = 0.0
    history: list[Record] = field(default_factory=list)

    def best(self) -> Record:
        """Return the entry with the highest mean accuracy; of equals the earliest."""
        return max(self.history, key=lambda entry: float(entry["mean"]))


def train(
    spec: TrainSpec,
    *,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    on_step: OnStep | None = None,
    workers: int = 2,
    save_every: int | None = None,
    device: str | None = None,
) -> TrainResult:
    """Train a source model on the benchmark below `data` and keep everything about it in the folder `out`.

    A stopped run resumes from its last save, made every `save_every` steps (default: at each validation), and ends with
    exactly the same weights. `workers` threads read images and do not change
    the result. `device` defaults to a GPU if there is one.

    Under `torchrun`, all processes share each batch and see `out`; only the first one writes there and calls `on_step`.
    """
    every = whole_number("save_every", spec.eval_every if save_every is None else save_every, least=1)
    with ExitStack() as stack:
        group = stack.enter_context(process_group(device))
        place = choose_device(device)
        sources = open_sources(spec, data)
        stack.enter_context(torch.random.fork_rng(devices=[place] if place.type == "cuda" else []))
        folder = RunFolder(Path(out).resolve())
        if group.rank == 0:
            folder = stack.enter_context(open_run(out, sources.record))
        group.wait()  # for the first process, which locks the folder and checks it
        trainer = SourceTrainer(spec, len(sources.record["data"]["classes"]), place, group)
        trainer.resume(folder)
        if trainer.progress.step < spec.steps:
            trainer.run(sources, folder, workers, every, on_step if folder.writes else None)
        _finish(trainer, folder)
    progress, best = trainer.progress, trainer.progress.best()
    return TrainResult(folder.best, best["step"], best["mean"], best["validation"], progress.seconds, progress.history)


def _finish(trainer: "SourceTrainer", folder: RunFolder) -> None:
    """Note the result."""
    if folder.writes:
        progress, best = trainer.progress, trainer.progress.best()
        folder.note(result={**best, "seconds": progress.seconds, "best_sha256": file_sha256(folder.best)})


class SourceTrainer(Trainer):
    """A source model under Adam. In a process group, each process trains on its rows of a batch."""

    def __init__(self, spec: TrainSpec, classes: int, device: torch.device, group: ProcessGroup = ALONE) -> None:
        torch.manual_seed(spec.seed)
        network = create(spec.network, num_classes=classes)
        self.fresh_head = spec.weights is None or not _load(network, spec.weights)
        _check_runs(network, spec, classes)
        super().__init__(network, device, partial(torch.optim.Adam, lr=spec.lr))
        self.spec, self.group, self.progress = spec, group, _Progress()
        self._distributed = DistributedNetwork(self.network, group) if group.size > 1 else None

    def resume(self, folder: RunFolder) -> None:
        """Continue from the last save, if there is one."""
        if saved := folder.restore(self):
            if not folder.best.exists():
                raise DataError(f"{folder.best} is missing; remove {folder.path} to start this run again")
            self.progress = _Progress(**saved["progress"])

    def run(self, sources: Sources, folder: RunFolder, workers: int, save_every: int, on_step: OnStep | None) -> None:
        """Take the remaining steps."""
        spec, progress = self.spec, self.progress
        folder.write_log(progress.history)  # without steps after the last save of a killed run
        folder.begin_session(progress.step, self, fresh_head=self.fresh_head, processes=self.group.size)
        began = time.perf_counter() - progress.seconds
        with closing(self._drawn(sources, workers)) as drawn:
            for step, batch in zip(range(progress.step, spec.steps), drawn, strict=False):
                last = step == spec.steps - 1
                loss = self.update(step, batch)
                progress.seconds = time.perf_counter() - began
                if last or step % spec.eval_every == 0:
                    self._validate(step, sources, folder, workers)
                    progress.seconds = time.perf_counter() - began
                if last or step % save_every == 0:
                    folder.save({"progress": asdict(progress)}, self)
                if on_step is not None:
                    mean = progress.history[-1]["mean"] if progress.history else None
                    on_step(StepReport(step, spec.steps, loss, mean))

    def _drawn(self, sources: Sources, workers: int) -> Any:
        """Yield the rows of this process of the batches from the next step on."""
        sets = list(sources.training.values())
        size, rows = self.spec.per_domain, self.group.rows(self.spec.per_domain * len(sets))
        return training_batches(
            sets, training(self.spec.size), per_domain=size, seed=self.spec.seed, start_step=self.progress.step,
            rows=rows, workers=workers,
        )  # fmt: skip

    def update(self, step: int, batch: Batch) -> float:
        """Take a step on a batch and return its loss."""
        torch.manual_seed(seed_hash("step", self.spec.seed, step) + self.group.rank)  # for layers such as dropout
        self.network.train()
        images = batch.images.to(self.device, memory_format=torch.channels_last)
        logits, factor = self._distributed(images) if self._distributed else (logits_of(self.network(images)), 1.0)
        own = F.cross_entropy(logits, batch.labels.to(self.device)) * factor
        self.optimizer.step(own)
        loss = self.group.sum(own).item() / self.group.size
        if not math.isfinite(loss):
            raise SettingError(f"lr={self.spec.lr}: the loss is {loss} at step {step}; lower the learning rate")
        self.progress.step = step + 1
        self.progress.loss_sum += loss
        self.progress.loss_count += 1
        return loss

    def _validate(self, step: int, sources: Sources, folder: RunFolder, workers: int) -> None:
        """Measure each source domain, log it, and keep the weights if they are the best so far."""
        progress = self.progress
        accuracies = {name: self._accuracy(images, workers) for name, images in sources.validation.items()}
        mean = sum(accuracies.values()) / len(accuracies)
        loss = progress.loss_sum / progress.loss_count
        entry = {"step": step, "loss": loss, "mean": mean, "validation": accuracies, "seconds": progress.seconds}
        progress.history.append(entry)
        progress.loss_sum, progress.loss_count = 0.0, 0
        if progress.best() is entry:
            folder.write_best(self)
        folder.write_log(progress.history)

    @torch.inference_mode()
    def _accuracy(self, images: ImageSet, workers: int) -> float:
        """Return the accuracy in percent, to which each process contributes its rows."""
        self.network.eval()
        own = np.arange(len(images))[self.group.rows(len(images))]
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        unaugmented, at_once = square(self.spec.size), 64
        for batch in batches(images, own, unaugmented, at_once, workers=workers, on_error="raise"):
            shown = batch.images.to(self.device, memory_format=torch.channels_last)
            correct += (logits_of(self.network(shown)).argmax(dim=1) == batch.labels.to(self.device)).sum()
        return float(100.0 * self.group.sum(correct).item() / len(images))


def _load(network: nn.Module, path: str | Path) -> bool:
    """Load a checkpoint, and its head if that fits too; return whether it did. All other tensors must fit."""
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
