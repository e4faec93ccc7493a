"""The training loop: draw, update, validate, keep the best, save; a stopped run resumes."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpl.core.errors import DataError, SettingError
from dpl.core.extras import choose_device
from dpl.core.files import file_sha256
from dpl.core.settings import whole_number
from dpl.data import Batch, ImageSet, batches, square, training, training_batches
from dpl.streams import seed_hash
from dpl.training.distributed import process_group
from dpl.training.run_folder import Record, RunFolder, draw_curves, new_record, open_run, session
from dpl.training.sources import Sources, TrainSpec, open_sources
from dpl.training.trainer import SourceTrainer

__all__ = ["StepReport", "TrainResult", "train"]

_VALIDATION_BATCH = 64


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
    cache: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    device: str | None = None,
) -> TrainResult:
    """Train a source model on the benchmark below `data` and keep everything about it in the folder `out`.

    A stopped run resumes from its last save, made every `save_every` steps (default: at each validation), and ends with
    exactly the same weights. `workers` threads read images, and `cache` is a folder for decoded ones; neither changes
    the result. `device` defaults to a GPU if there is one.

    Under `torchrun`, all processes share each batch and see `out`; only the first one writes there and calls `on_step`.
    """
    every = whole_number("save_every", spec.eval_every if save_every is None else save_every, least=1)
    with ExitStack() as stack:
        group = stack.enter_context(process_group(device))
        place = choose_device(device)
        sources = open_sources(spec, data, cache=cache, workers=workers)
        stack.enter_context(torch.random.fork_rng(devices=[place] if place.type == "cuda" else []))
        folder, record = RunFolder(Path(out).resolve()), None
        if group is None or group.rank == 0:
            folder, record = stack.enter_context(open_run(out, new_record(spec, sources)))
        if group is not None:
            group.wait()  # for the first process, which locks the folder and checks it
        run = _Run(spec, sources, SourceTrainer(spec, len(sources.classes), place, group), folder, record, workers)
        run.restore()
        if run.progress.step < spec.steps:
            run.go(every, on_step)
        if record is not None:
            _finish(run, record)
        best = run.progress.best()
        return TrainResult(
            folder.best, best["step"], best["mean"], best["validation"], run.progress.seconds, run.progress.history
        )


def _finish(run: "_Run", record: Record) -> None:
    """Note the result, draw the learning curve."""
    folder, progress, settings = run.folder, run.progress, record["settings"]
    record["result"] = {**progress.best(), "seconds": progress.seconds, "best_sha256": file_sha256(folder.best)}
    folder.write_record(record)
    trained_on = f"without {settings['target']}" if settings["target"] else f"{settings['source']} alone"
    draw_curves(progress.history, f"{run.spec.network} on {settings['dataset']}, {trained_on}", folder.curves)


@dataclass
class _Run:
    spec: TrainSpec
    sources: Sources
    trainer: SourceTrainer
    folder: RunFolder
    record: Record | None  # None: another process writes the folder
    workers: int
    progress: _Progress = field(default_factory=_Progress)

    def restore(self) -> None:
        """Restore trainer and progress from the last save, if there is one."""
        if saved := self.trainer.restore(self.folder):
            if not self.folder.best.exists():
                raise DataError(f"{self.folder.best} is missing; remove {self.folder.path} to start this run again")
            self.progress = _Progress(**saved["progress"])

    def go(self, save_every: int, on_step: OnStep | None) -> None:
        """Run the remaining steps."""
        spec, progress = self.spec, self.progress
        if self.record is not None:
            self._begin_session(self.record)
        began = time.perf_counter() - progress.seconds
        with closing(self._drawn()) as drawn:
            for step, batch in zip(range(progress.step, spec.steps), drawn, strict=False):
                loss = self._update(step, batch)
                progress.seconds = time.perf_counter() - began
                if _due(step, spec.eval_every, spec.steps):
                    self._validate(step)
                    progress.seconds = time.perf_counter() - began
                if self.record is not None and _due(step, save_every, spec.steps):
                    self.folder.write_state({"progress": asdict(progress)}, self.trainer.state())
                if self.record is not None and on_step is not None:
                    mean = progress.history[-1]["mean"] if progress.history else None
                    on_step(StepReport(step, spec.steps, loss, mean))

    def _begin_session(self, record: Record) -> None:
        """Note who goes on from where."""
        self.folder.write_log(self.progress.history)  # without steps after the last save of a killed run
        trainer, group = self.trainer, self.trainer.group
        facts = {"fresh_head": trainer.fresh_head, "processes": 1 if group is None else group.size}
        record["sessions"].append(session(self.progress.step, trainer.device) | facts)
        self.folder.write_record(record)

    def _drawn(self) -> Any:
        """Yield the batches from the next step on, or the rows of this process."""
        sets = [domain.training for domain in self.sources.domains]
        size, group = self.spec.per_domain, self.trainer.group
        return training_batches(
            sets, training(self.spec.size), per_domain=size, seed=self.spec.seed, start_step=self.progress.step,
            rows=None if group is None else group.rows(size * len(sets)), workers=self.workers,
        )  # fmt: skip

    def _update(self, step: int, batch: Batch) -> float:
        loss = self.trainer.update(batch, seed_hash("step", self.spec.seed, step))
        if not math.isfinite(loss):
            raise SettingError(f"lr={self.spec.lr}: the loss is {loss} at step {step}; lower the learning rate")
        self.progress.step += 1
        self.progress.loss_sum += loss
        self.progress.loss_count += 1
        return loss

    def _validate(self, step: int) -> None:
        """Measure each source domain, log it, and keep the weights if they are the best so far."""
        progress = self.progress
        accuracies = {domain.name: self._accuracy(domain.validation) for domain in self.sources.domains}
        mean = sum(accuracies.values()) / len(accuracies)
        loss = progress.loss_sum / progress.loss_count
        entry = {"step": step, "loss": loss, "mean": mean, "validation": accuracies, "seconds": progress.seconds}
        progress.history.append(entry)
        progress.loss_sum, progress.loss_count = 0.0, 0
        if self.record is not None:
            if progress.best() is entry:
                self.folder.write_best(self.trainer.weights())
            self.folder.write_log(progress.history)

    def _accuracy(self, images: ImageSet) -> float:
        """Return the accuracy on all images, of which this process predicts its share."""
        group = self.trainer.group
        own = None if group is None else np.arange(len(images))[group.rows(len(images))]
        unaugmented = square(self.spec.size)
        return self.trainer.accuracy(
            batches(images, own, unaugmented, _VALIDATION_BATCH, workers=self.workers, on_error="raise")
        )


def _due(step: int, every: int, steps: int) -> bool:
    """Whether an event is due that happens after step 0, every `every` steps, and after the last step."""
    return step % every == 0 or step == steps - 1
