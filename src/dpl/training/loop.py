"""The training loop: draw, update, validate, keep the best, save; from wherever the run was stopped."""

import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dpl.core.errors import DataError, SettingError
from dpl.core.files import file_sha256
from dpl.data import Batch, batches, square, training, training_batches
from dpl.data.sets import Indices
from dpl.streams import seed_hash
from dpl.streams.domain import whole_number
from dpl.training.curves import draw_curves
from dpl.training.folder import TrainFolder, opened
from dpl.training.record import check_same, describe, session
from dpl.training.sources import Sources, open_sources
from dpl.training.spec import TrainSpec
from dpl.training.team import Team, started
from dpl.training.trainer import Learner

__all__ = ["StepReport", "TrainResult", "train"]

_VALIDATION_BATCH = 64
Record = dict[str, Any]


@dataclass(frozen=True)
class StepReport:
    """How a run stands after one step; `mean` is the last validation accuracy in percent, None before the first."""

    step: int
    steps: int
    loss: float
    mean: float | None


OnStep = Callable[[StepReport], None]


@dataclass(frozen=True)
class TrainResult:
    """A finished run; accuracies are in percent, on the held-out images of the source domains."""

    weights: Path
    """The checkpoint that was kept."""
    step: int
    """The step after which it was taken, counted from 0."""
    mean: float
    validation: dict[str, float]
    seconds: float
    """Time spent, without what was lost when a run was killed."""
    history: list[Record] = field(repr=False)


@dataclass
class _Progress:
    """What goes on from step to step beside the network; all of it is saved."""

    step: int = 0  # the next one
    loss_sum: float = 0.0  # since the last validation
    loss_count: int = 0
    seconds: float = 0.0
    history: list[Record] = field(default_factory=list)

    def add(self, loss: float) -> None:
        self.step += 1
        self.loss_sum += loss
        self.loss_count += 1

    def best(self) -> Record:
        """Return the highest mean accuracy; of equals the earliest."""
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

    A run that was stopped goes on from its last save, which happens every `save_every` steps (default: whenever it
    validates), and ends with the same weights to the bit. `workers` threads read images, and `cache` is a folder for
    decoded ones: neither changes the result. `device` is by default the GPU where there is one.

    Started by `torchrun`, all processes share each batch; the first one alone writes the folder and calls `on_step`.
    """
    every = whole_number("save_every", spec.eval_every if save_every is None else save_every, least=1)
    with ExitStack() as stack:
        team = stack.enter_context(started(device))
        place = _device(device, team)
        sources = open_sources(spec, data, cache=cache, workers=workers)
        stack.enter_context(torch.random.fork_rng(devices=[place] if place.type == "cuda" else []))
        if team is not None and team.rank > 0:
            return _help(spec, sources, team, place, Path(out), workers)
        folder = stack.enter_context(opened(out))
        asked = describe(spec, sources)
        record = folder.description() or asked
        check_same(record, asked, folder.path)
        learner = Learner(spec, len(sources.classes), place, team)
        run = _Run(spec, sources, learner, folder, workers, _restore(folder, learner))
        if team is not None:
            team.hear(asdict(run.progress))
            team.hear_tensors(learner.state())
        if run.progress.step < spec.steps:
            record["sessions"].append(
                session(run.progress.step, place)
                | {"fresh_head": learner.fresh_head, "processes": 1 if team is None else team.size}
            )
            folder.describe(record)
            run.go(every, on_step)
        return _finish(run.progress, folder, record)


def _help(spec: TrainSpec, sources: Sources, team: Team, place: torch.device, out: Path, workers: int) -> TrainResult:
    """Do this process's share of a run whose folder the first process keeps."""
    learner = Learner(spec, len(sources.classes), place, team)
    progress = _Progress(**team.hear())
    learner.load_state(team.hear_tensors())
    _Run(spec, sources, learner, None, workers, progress).go(spec.steps, None)
    best = progress.best()
    return TrainResult(
        out / "best.safetensors", best["step"], best["mean"], best["validation"], progress.seconds, progress.history
    )


def _device(name: str | None, team: Team | None) -> torch.device:
    try:
        if team is not None and name is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise SettingError(f"device={name!r}: no device of that name; expected cpu, cuda or cuda:N") from error


def _restore(folder: TrainFolder, learner: Learner) -> _Progress:
    """Bring the learner to where the run was stopped, and the folder's log with it."""
    saved = folder.saved()
    if saved is None:
        progress = _Progress()
    else:
        manifest, tensors = saved
        learner.load_state(tensors)
        progress = _Progress(**manifest["progress"])
        if not folder.best.exists():
            raise DataError(f"{folder.best} is missing; remove {folder.path} to begin this run again")
    folder.write_log(progress.history)
    return progress


def _finish(progress: _Progress, folder: TrainFolder, record: Record) -> TrainResult:
    best = progress.best()
    record["result"] = {**best, "seconds": progress.seconds, "best_sha256": file_sha256(folder.best)}
    folder.describe(record)
    settings = record["settings"]
    left_out = f"without {settings['target']}" if settings["target"] else f"{settings['source']} alone"
    draw_curves(progress.history, f"{settings['network']} on {settings['dataset']}, {left_out}", folder.curves)
    return TrainResult(
        folder.best, best["step"], best["mean"], best["validation"], progress.seconds, list(progress.history)
    )


@dataclass
class _Run:
    spec: TrainSpec
    sources: Sources
    learner: Learner
    folder: TrainFolder | None
    """None in a process that helps another."""
    workers: int
    progress: _Progress

    def go(self, save_every: int, on_step: OnStep | None) -> None:
        """Do all steps that are left."""
        spec, progress = self.spec, self.progress
        began = time.perf_counter() - progress.seconds
        with closing(self._drawn()) as drawn:
            for step, batch in zip(range(progress.step, spec.steps), drawn, strict=False):
                loss = self._update(step, batch)
                progress.seconds = time.perf_counter() - began
                if _due(step, spec.eval_every, spec.steps):
                    self._validate(step)
                    progress.seconds = time.perf_counter() - began
                if self.folder is not None and _due(step, save_every, spec.steps):
                    self.folder.save({"progress": asdict(progress)}, self.learner.state())
                if on_step is not None:
                    mean = progress.history[-1]["mean"] if progress.history else None
                    on_step(StepReport(step, spec.steps, loss, mean))

    def _drawn(self) -> Generator[Batch, None, None]:
        sets, team = [domain.training for domain in self.sources.domains], self.learner.team
        drawn = training_batches(
            sets,
            training(self.spec.size),
            per_domain=self.spec.per_domain,
            seed=self.spec.seed,
            start_step=self.progress.step,
            rows=None if team is None else team.rows(self.spec.per_domain * len(sets)),
            workers=self.workers,
        )
        return cast(Generator[Batch, None, None], drawn)

    def _update(self, step: int, batch: Batch) -> float:
        loss = self.learner.update(batch, seed_hash("step", self.spec.seed, step))
        if not math.isfinite(loss):
            raise SettingError(f"lr={self.spec.lr}: the loss is {loss} at step {step}; lower the learning rate")
        self.progress.add(loss)
        return loss

    def _validate(self, step: int) -> None:
        """Measure each source domain, log it, and keep the weights if they are the best so far."""
        progress = self.progress
        accuracies = {}
        for domain in self.sources.domains:
            plain = batches(
                domain.validation, self._own(len(domain.validation)), square(self.spec.size), _VALIDATION_BATCH,
                workers=self.workers, on_error="raise",
            )  # fmt: skip
            accuracies[domain.name] = self.learner.accuracy(plain)
        mean = sum(accuracies.values()) / len(accuracies)
        loss = progress.loss_sum / progress.loss_count
        entry = {"step": step, "loss": loss, "mean": mean, "validation": accuracies, "seconds": progress.seconds}
        progress.history.append(entry)
        progress.loss_sum, progress.loss_count = 0.0, 0
        if self.folder is None:
            return
        if progress.best() is entry:
            self.folder.write_best(self.learner.weights())
        self.folder.append_log(entry)

    def _own(self, count: int) -> Indices | None:
        """Return which of `count` images this process validates with; None for all."""
        team = self.learner.team
        return None if team is None else np.arange(count)[team.rows(count)]


def _due(step: int, every: int, steps: int) -> bool:
    """Whether something happens after this step that happens after step 0, every so many steps, and at the end."""
    return step % every == 0 or step == steps - 1
