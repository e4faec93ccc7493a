"""Predict a folder of images with an adaptive model: a predictions file, a snapshot, and a way to go on after a stop.

With a snapshot folder the job is resumable: every few batches the rows written so far are flushed to the disk, then
the model's state is saved with the file's length. A job that starts again cuts the file back to that
length and goes on; its rows are those of a job that was never stopped.
"""

import csv
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from dpl.model.adaptive import AdaptiveModel, load
from dpl.data import Batch, ImageSet, batches
from dpl.data.transforms import Evaluation
from dpl.core.errors import DataError, SnapshotError
from dpl.runs.record import FolderRecord
from dpl.runs.live import numbers
from dpl.snapshot import read_manifest
from dpl.network.split import logits_of

__all__ = ["FolderJob", "FolderResult", "run_folder"]

COLUMNS = ("image", "predicted", "name", "confidence", "label")


@dataclass(frozen=True)
class FolderJob:
    """What to predict, in which order, and where to write it."""

    images: ImageSet
    transform: Evaluation
    out: Path
    names: Sequence[str] = ()
    snapshot: Path | None = None
    batch_size: int = 32
    shuffled: bool = True
    seed: int = 0
    every: int = 20  # batches between two snapshots
    workers: int = 2
    with_source: bool = False
    """Also predict with the source model, in a last column of its own."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the record beside the predictions says of the job."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the predictions file."""
        return (*COLUMNS, "source") if self.with_source else COLUMNS

    def order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the order in which the images are met."""
        count = len(self.images)
        return np.random.default_rng(self.seed).permutation(count) if self.shuffled else np.arange(count)

    def fingerprint(self) -> str:
        """Hash everything that decides the stream, so that a job is never resumed on another one."""
        digest = hashlib.sha256()
        for part in self.images.source.identity():
            digest.update(part)
        about = [asdict(self.transform), self.batch_size, self.shuffled, self.seed, list(self.names)]
        about += ["with source"] if self.with_source else []
        digest.update(json.dumps(about).encode())
        return digest.hexdigest()


@dataclass
class FolderResult:
    """How far a job is."""

    images: int = 0
    correct: int = 0
    labelled: int = 0
    updates: int = 0
    batches: int = 0
    resumed: int = 0  # images that an earlier run had done
    failed: list[list[str]] = field(default_factory=list)  # [path, reason]
    guard: dict[str, int] | None = None  # how often the guard took each action; None without a guard
    by_source: int = 0  # images that the guard had answered by the source model
    latest: dict[str, float] = field(default_factory=dict)  # figures of the last batch

    @property
    def accuracy(self) -> float | None:
        """Accuracy in percent over the images whose class is known, if any."""
        return 100.0 * self.correct / self.labelled if self.labelled else None


def run_folder(
    job: FolderJob, model: AdaptiveModel, network: nn.Module, on_batch: Callable[[FolderResult, int], None]
) -> FolderResult:
    """Predict and adapt over the whole folder; `network` is the source model that `model` was made from."""
    model, result, length = _continue(job, model, network)
    if length is not None and result.images + len(result.failed) >= len(job.images):
        return result
    position = result.images + len(result.failed)
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with job.out.open("w" if length is None else "r+", newline="") as file:
        if length is not None:
            file.seek(length)
            file.truncate()
        writer = csv.writer(file)
        if length is None:
            writer.writerow(job.columns)
        record = FolderRecord.begin(job.out, _facts(job), model, resumed=length is not None)
        stream = batches(job.images, job.order()[position:], job.transform, job.batch_size, workers=job.workers)
        _predict(job, model, network, stream, writer, file, result, record, on_batch)
        _commit(job, model, result, file, record)
    return result


def _facts(job: FolderJob) -> dict[str, Any]:
    order = f"shuffled with seed {job.seed}" if job.shuffled else "sorted by name"
    return {"classes": list(job.names), "batch_size": job.batch_size, "order": order, "seed": job.seed, **job.facts}


def _predict(
    job: FolderJob,
    model: AdaptiveModel,
    network: nn.Module,
    stream: Iterator[Batch],
    writer: Any,
    file: IO[str],
    result: FolderResult,
    record: FolderRecord,
    on_batch: Callable[[FolderResult, int], None],
) -> None:
    device = next(model.model.parameters()).device
    for batch in stream:
        result.failed += [list(item) for item in batch.failed]
        if len(batch):
            images = batch.images.to(device)
            start = time.perf_counter()
            with record.work.counted(len(images)):
                logits = model(images)
            record.note(model, len(images), time.perf_counter() - start)
            answered = _answered(job, model, batch, result)
            rows = _rows(job, batch, answered, logits, result)
            if job.with_source and rows:
                _add_source(rows, network, images[answered], record, result)
            writer.writerows(rows)
            result.updates += bool(model.last.get("updated", False))
        result.batches += 1
        result.latest |= numbers(model.last)
        if result.batches % job.every == 0:
            _commit(job, model, result, file, record)
        on_batch(result, len(batch) + len(batch.failed))


@torch.no_grad()
def _add_source(
    rows: list[list[Any]], network: nn.Module, images: torch.Tensor, record: FolderRecord, result: FolderResult
) -> None:
    """Add the class that the source model answers to each row."""
    training = network.training
    with record.source_work.counted(len(images)):
        answers = logits_of(network.eval()(images)).argmax(dim=1).tolist()
    network.train(training)
    for row, answer in zip(rows, answers, strict=True):
        row.append(answer)
    result.latest["agreement"] = sum(row[1] == row[-1] for row in rows) / max(1, len(rows))


def _answered(job: FolderJob, model: AdaptiveModel, batch: Batch, result: FolderResult) -> list[int]:
    """Return the rows that got an answer; note those that the guard set aside and what else it did."""
    if model.guard is None:
        return list(range(len(batch)))
    aside = model.last["set_aside"]
    result.failed += [[job.images.location(int(batch.indices[row])), reason] for row, reason in aside.items()]
    result.guard = dict(model.guard.counts)
    answered = [row for row in range(len(batch)) if row not in aside]
    result.by_source += len(answered) * (model.last["guard"]["answered_by"] == "source")
    return answered


def _rows(
    job: FolderJob, batch: Batch, answered: list[int], logits: torch.Tensor, result: FolderResult
) -> list[list[Any]]:
    confidence, predicted = (part.tolist() for part in logits[answered].float().softmax(dim=1).max(dim=1))
    rows = []
    for index, label, top, guess in zip(
        batch.indices[answered].tolist(), batch.labels[answered].tolist(), confidence, predicted, strict=True
    ):
        name = job.names[guess] if guess < len(job.names) else ""
        known = job.names[label] if 0 <= label < len(job.names) else ""
        rows.append([job.images.location(index), guess, name, f"{top:.6f}", known])
        result.labelled += label >= 0
        result.correct += label >= 0 and label == guess
    result.images += len(rows)
    result.latest = {"confidence": sum(confidence) / max(1, len(confidence))}
    return rows


def _commit(job: FolderJob, model: AdaptiveModel, result: FolderResult, file: IO[str], record: FolderRecord) -> None:
    """Put the rows on the disk, then the state that made them, then the record of both."""
    file.flush()
    os.fsync(file.fileno())
    if job.snapshot is not None:
        model.save(job.snapshot, {"job": job.fingerprint(), "bytes": file.tell(), "result": asdict(result)})
    record.write(asdict(result), len(job.images))


def _continue(
    job: FolderJob, model: AdaptiveModel, network: nn.Module
) -> tuple[AdaptiveModel, FolderResult, int | None]:
    """Return the model, how far an earlier run came, and how long the predictions file was then (None: a new job)."""
    if job.snapshot is None or not job.snapshot.exists():
        return model, FolderResult(), None
    manifest = read_manifest(job.snapshot)
    notes = manifest["notes"]
    guard = None if model.guard is None else asdict(model.guard.settings)
    stored = (manifest["method"], notes.get("job"), manifest["settings"], manifest["guard"])
    wanted = (model.method.info.name, job.fingerprint(), model.stored_settings(), guard)
    if list(stored) != json.loads(json.dumps(wanted)):
        raise SnapshotError(
            f"{job.snapshot} belongs to another job (other images, order, method, settings or guard); choose another "
            "--snapshot folder, or remove it to start over"
        )
    if not job.out.is_file() or job.out.stat().st_size < notes["bytes"]:
        raise DataError(f"{job.out} is shorter than {job.snapshot} remembers; remove that snapshot to start over")
    result = FolderResult(**notes["result"])
    result.resumed = result.images
    return load(job.snapshot, network), result, notes["bytes"]
