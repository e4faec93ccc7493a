"""Predict a folder of images with an adaptive model: a predictions file, a snapshot, and resumption after a stop.

With a snapshot folder the run is resumable: every few batches the predictions so far are flushed to the disk, then the
model's state is saved with the file's length. A run that starts again cuts the file back to that length and continues;
its predictions are those of a run that was never stopped.
"""

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpl.core.errors import DataError, InputError, SnapshotError
from dpl.core.files import naming
from dpl.data import Batch, ImageSet, batches
from dpl.data.transforms import Evaluation
from dpl.model.adaptive import AdaptiveModel, load
from dpl.model.inputs import is_out_of_memory
from dpl.network.split import logits_of
from dpl.runs.costs import forget_peak
from dpl.runs.online import BatchResult, online
from dpl.runs.record import FolderRecord, record_path
from dpl.snapshot import read_manifest

__all__ = ["FolderResult", "FolderRun", "out_of_memory_says", "run_folder"]

COLUMNS = ("image", "predicted", "name", "confidence", "label")


@dataclass(frozen=True)
class FolderRun:
    """What to predict, in which order, and where to write it."""

    images: ImageSet
    transform: Evaluation
    out: Path
    names: Sequence[str] = ()
    snapshot: Path | None = None
    batch_size: int = 32
    shuffled: bool = True
    seed: int = 0
    save_every: int = 20
    """Batches between two snapshots."""
    workers: int = 2
    with_source: bool = False
    """Also predict with the source model, in a last column."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the record beside the predictions adds about the run."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the predictions file."""
        return (*COLUMNS, "source") if self.with_source else COLUMNS

    def order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the order in which the images are met."""
        count = len(self.images)
        return np.random.default_rng(self.seed).permutation(count) if self.shuffled else np.arange(count)

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the stream, so that a run is never resumed on another one."""
        digest = hashlib.sha256()
        for part in self.images.source.identity():
            digest.update(part)
        return {
            "images": digest.hexdigest(), "preparation of images": asdict(self.transform), "classes": list(self.names),
            "batch size": self.batch_size, "order": self._order_name(), "source column": self.with_source,
        }  # fmt: skip

    def _order_name(self) -> str:
        return f"shuffled with seed {self.seed}" if self.shuffled else "sorted by name"

    def description(self) -> dict[str, Any]:
        """Return what the record beside the predictions says about the run."""
        known = {"classes": list(self.names), "batch_size": self.batch_size, "order": self._order_name()}
        return known | {"seed": self.seed} | dict(self.facts)


@dataclass
class FolderResult:
    """How far a run is."""

    images: int = 0
    correct: int = 0
    labelled: int = 0
    updates: int = 0
    batches: int = 0
    resumed: int = 0  # images that an earlier run had predicted
    failed: list[list[str]] = field(default_factory=list)  # [path, reason]
    guard: dict[str, int] | None = None  # how often the guard took each action; None without a guard
    estimate: dict[str, Any] | None = None  # of the accuracy at the end, without labels; None: nothing was watched
    by_source: int = 0  # images for which the guard returned the source model's prediction

    @property
    def accuracy(self) -> float | None:
        """Accuracy in percent over the images whose class is known, if any."""
        return 100.0 * self.correct / self.labelled if self.labelled else None

    @property
    def position(self) -> int:
        """How many images of the folder were met, predicted or not."""
        return self.images + len(self.failed)


def run_folder(
    run: FolderRun, model: AdaptiveModel, network: nn.Module, on_batch: Callable[[FolderResult], None]
) -> FolderResult:
    """Predict and adapt over the whole folder; `network` is the source model that `model` was made from."""
    model, result, record, length = _resume(run, model, network)
    if length is not None and result.position >= len(run.images):
        return result
    forget_peak()
    with _predictions_file(run, length) as file, out_of_memory_says(partial(_where_memory_ran_out, run, result)):
        writer = csv.writer(file)
        for step in online(model, _readable(run, result), record.work):
            record.note(step, model.guard)
            writer.writerows(_rows(run, model, network, step, result, record))
            result.batches += 1
            result.updates += step.skipped_because is None
            if result.batches % run.save_every == 0:
                _save(run, model, result, file, record)
            on_batch(result)
        _save(run, model, result, file, record)
        on_batch(result)  # with the unreadable images at the end
    return result


def _resume(
    run: FolderRun, model: AdaptiveModel, network: nn.Module
) -> tuple[AdaptiveModel, FolderResult, FolderRecord, int | None]:
    """Return the model, how far an earlier run came, and how long the predictions file was then (None: a new run)."""
    if run.snapshot is None or not run.snapshot.exists():
        return model, FolderResult(), FolderRecord(), None
    manifest = read_manifest(run.snapshot)
    notes = manifest["notes"]
    guard = None if model.guard is None else asdict(model.guard.settings)
    job = notes["job"] if isinstance(notes.get("job"), dict) else {}  # version 0.1 kept a hash
    stored = {"method": manifest["method"], "guard": manifest["guard"]} | job | manifest["settings"]
    wanted = {"method": model.method.info.name, "guard": guard} | run.identity() | model.stored_settings()
    other = [name for name, value in json.loads(json.dumps(wanted)).items() if stored.get(name) != value]
    if other:
        raise SnapshotError(
            f"{run.snapshot} belongs to another run, which had other {', '.join(other)}; choose another --snapshot "
            "folder, or remove it to start over"
        )
    if not run.out.is_file() or run.out.stat().st_size < notes["bytes"]:
        raise DataError(f"{run.out} is shorter than when {run.snapshot} was saved; remove that snapshot to start over")
    result = FolderResult(**notes["result"])
    result.resumed = result.images
    model = load(run.snapshot, network, source=model.source_batches, calibrate=model.calibration)
    return model, result, FolderRecord(**notes.get("record", {})), notes["bytes"]


@contextmanager
def _predictions_file(run: FolderRun, length: int | None) -> Iterator[IO[str]]:
    """Open the predictions file: new with its header, or cut back to the length that it had at the last save."""
    run.out.parent.mkdir(parents=True, exist_ok=True)
    with naming(run.out), run.out.open("w" if length is None else "r+", newline="") as file:
        if length is None:
            csv.writer(file).writerow(run.columns)
        else:
            file.seek(length)
            file.truncate()
        yield file


@contextmanager
def out_of_memory_says(sentence: Callable[[], str]) -> Iterator[None]:
    """Where memory runs out in the block, raise an InputError with this sentence."""
    try:
        yield
    except Exception as error:  # of any kind: a network's own is told as an InputError
        if not is_out_of_memory(error):
            raise
        raise InputError(sentence()) from error


def _where_memory_ran_out(run: FolderRun, result: FolderResult) -> str:
    """Say how far the run is and what to do; the last snapshot is left as it is."""
    advice = f"memory ran out after {result.position} of {len(run.images)} images: use a smaller --batch-size than"
    if run.snapshot is None or not run.snapshot.exists():
        return f"{advice} {run.batch_size}"
    return (
        f"{advice} {run.batch_size} with another --snapshot folder; the same command again resumes from {run.snapshot}"
    )


def _readable(run: FolderRun, result: FolderResult) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the batches that are left; images that cannot be read are noted."""
    left = run.order()[result.position :]
    for batch in batches(run.images, left, run.transform, run.batch_size, workers=run.workers):
        result.failed += [list(item) for item in batch.failed]
        if len(batch):
            yield batch.images, batch


def _rows(
    run: FolderRun, model: AdaptiveModel, network: nn.Module, step: BatchResult[Batch], result: FolderResult,
    record: FolderRecord,
) -> list[list[Any]]:  # fmt: skip
    """Return a batch's lines of the predictions file, one for each image that the guard accepted."""
    batch, rows = step.batch, []
    accepted = _accepted(run, model, batch, result)
    for place in accepted:
        label, predicted = int(batch.labels[place]), step.predictions[place]
        name = run.names[predicted] if predicted < len(run.names) else ""
        known = run.names[label] if 0 <= label < len(run.names) else ""
        where = run.images.location(int(batch.indices[place]))
        rows.append([where, predicted, name, f"{step.confidences[place]:.6f}", known])
        result.labelled += label >= 0
        result.correct += label >= 0 and label == predicted
    result.images += len(rows)
    if run.with_source and rows:
        _add_source(rows, network, batch.images[accepted], record)
    return rows


def _accepted(run: FolderRun, model: AdaptiveModel, batch: Batch, result: FolderResult) -> list[int]:
    """Return the positions of the images that the guard accepted; note those it excluded and what else it did."""
    if model.guard is None:
        return list(range(len(batch)))
    excluded = model.last["set_aside"]
    result.failed += [[run.images.location(int(batch.indices[row])), reason] for row, reason in excluded.items()]
    result.guard = dict(model.guard.counts)
    accepted = [row for row in range(len(batch)) if row not in excluded]
    result.by_source += len(accepted) * (model.last["guard"]["answered_by"] == "source")
    return accepted


@torch.no_grad()
def _add_source(rows: list[list[Any]], network: nn.Module, images: Tensor, record: FolderRecord) -> None:
    """Add the source model's prediction to each line."""
    training, device = network.training, next(network.parameters()).device
    with record.source_work.counted(len(images)):
        predictions = logits_of(network.eval()(images.to(device))).argmax(dim=1).tolist()
    network.train(training)
    for row, predicted in zip(rows, predictions, strict=True):
        row.append(predicted)


def _save(run: FolderRun, model: AdaptiveModel, result: FolderResult, file: IO[str], record: FolderRecord) -> None:
    """Put the predictions on the disk, then the state that made them, then the record of both."""
    file.flush()
    os.fsync(file.fileno())
    result.estimate = None if model.watch is None else model.estimate().as_dict()
    told = asdict(result)
    if run.snapshot is not None:
        notes = {"job": run.identity(), "bytes": file.tell(), "result": told, "record": record.kept()}
        model.save(run.snapshot, notes)
    record.write(record_path(run.out), run.description() | {"result": told, "total": len(run.images)}, model)
