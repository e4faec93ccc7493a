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
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor, nn

from dpl.core.errors import DataError, InputError, SnapshotError
from dpl.core.files import naming, write_file
from dpl.data import Batch, ImageSet, batches
from dpl.data.transforms import Evaluation
from dpl.guard import Guard
from dpl.model.adaptive import AdaptiveModel, adapt
from dpl.model.inputs import is_out_of_memory
from dpl.model.load import load
from dpl.runs.costs import Work, environment, forget_peak, peak_memory
from dpl.runs.online import BatchResult, online, send
from dpl.snapshot import read_manifest

__all__ = ["COLUMNS", "FolderResult", "FolderRun", "out_of_memory_says", "record_path", "run_folder"]

COLUMNS = ("image", "predicted", "name", "confidence", "label")
_EVENTS = 1000  # at most so many are kept
_REASONS = 20  # different ones; further ones count as others


@dataclass(frozen=True)
class FolderRun:
    """What to predict, in which order, and where to write it."""

    images: ImageSet
    transform: Evaluation
    out: Path = Path("predictions.csv")
    names: Sequence[str] = ()
    snapshot: Path | None = None
    batch_size: int = 32
    shuffled: bool = True
    seed: int = 0
    save_every: int = 20  # batches between two snapshots
    workers: int = 2
    with_source: bool = False  # also predict with the source model, in a last column
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the record beside the predictions adds about the run

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Read the images from `start` to `stop`, counted in the order in which they are met."""
        count = len(self.images)
        order = np.random.default_rng(self.seed).permutation(count) if self.shuffled else np.arange(count)
        return batches(self.images, order[start:stop], self.transform, self.batch_size, workers=self.workers)

    @property
    def order(self) -> str:
        """The order in words."""
        return f"shuffled with seed {self.seed}" if self.shuffled else "sorted by name"

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the stream, so that a run is never resumed on another one."""
        digest = hashlib.sha256()
        for part in self.images.source.identity():
            digest.update(part)
        return {
            "images": digest.hexdigest(), "preparation of images": asdict(self.transform), "classes": list(self.names),
            "batch size": self.batch_size, "order": self.order, "source column": self.with_source,
        }  # fmt: skip


@dataclass
class FolderResult:
    """How far a run is, and what it came to; a resumed run continues it."""

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
    seconds: float = 0.0  # inside the model
    timed: int = 0  # images in these seconds
    skipped_because: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # of the guard

    @property
    def accuracy(self) -> float | None:
        """Accuracy in percent over the images whose class is known, if any."""
        return 100.0 * self.correct / self.labelled if self.labelled else None

    @property
    def position(self) -> int:
        """How many images of the folder were met, predicted or not."""
        return self.images + len(self.failed)

    def add(self, step: BatchResult[Any], guard: Guard | None) -> None:
        """Count a batch, whatever was predicted."""
        self.batches += 1
        self.timed += len(step.predictions)
        self.seconds += step.seconds
        if (reason := step.skipped_because) is None:
            self.updates += 1
        else:
            name = reason if reason in self.skipped_because or len(self.skipped_because) < _REASONS else "others"
            self.skipped_because[name] = self.skipped_because.get(name, 0) + 1
        if guard is not None:
            self.guard = dict(guard.counts)
            fresh = [e for e in guard.events if e.batch == guard.batches][: max(0, _EVENTS - len(self.events))]
            self.events += [{"batch": e.batch, "action": e.action, "reason": e.reason, "alarm": e.alarm} for e in fresh]

    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the counts, and what the record has beside them."""
        counts = asdict(self)
        return counts, {name: counts.pop(name) for name in ("seconds", "timed", "skipped_because", "events")}


def record_path(out: Path) -> Path:
    """Return the path of the record of a predictions file."""
    return out.with_suffix(".run.json")


def run_folder(
    run: FolderRun, model: AdaptiveModel, network: nn.Module, on_batch: Callable[[FolderResult], None]
) -> FolderResult:
    """Predict and adapt over the whole folder; `network` is the source model that `model` was made from."""
    loop = _FolderLoop(run, model, network)
    result = loop.result
    if loop.length is not None and result.position >= len(run.images):
        return result
    forget_peak()
    with loop.predictions_file() as file, out_of_memory_says(loop.where_memory_ran_out):
        writer = csv.writer(file)
        for step in online(loop.model, loop.readable(), loop.work):
            writer.writerows(loop.rows(step))
            if result.batches % run.save_every == 0:
                loop.save(file)
            on_batch(result)
        loop.save(file)
        on_batch(result)  # with the unreadable images at the end
    return result


@contextmanager
def out_of_memory_says(sentence: Callable[[], str]) -> Iterator[None]:
    """Where memory runs out in the block, raise an InputError with this sentence."""
    try:
        yield
    except Exception as error:  # of any kind: a network's own is told as an InputError
        if not is_out_of_memory(error):
            raise
        raise InputError(sentence()) from error


class _FolderLoop:
    """A run over a folder on its way, from its beginning or from where an earlier one was."""

    def __init__(self, run: FolderRun, model: AdaptiveModel, network: nn.Module) -> None:
        self.run, self.model, self.network = run, model, network
        self.source = adapt(network, "source") if run.with_source else None
        self.result, self.work, self.source_work = FolderResult(), Work(), Work()
        self.length: int | None = None  # of the predictions file that is continued
        if run.snapshot is not None and run.snapshot.exists():
            self._resume(run.snapshot)

    def _resume(self, snapshot: Path) -> None:
        run, model, manifest = self.run, self.model, read_manifest(snapshot)
        notes = manifest["notes"]
        guard = None if model.guard is None else asdict(model.guard.settings)
        job = notes["job"] if isinstance(notes.get("job"), dict) else {}  # version 0.1 kept a hash
        stored = {"method": manifest["method"], "guard": manifest["guard"]} | job | manifest["settings"]
        wanted = {"method": model.method.info.name, "guard": guard} | run.identity() | model.identity()["settings"]
        other = [name for name, value in json.loads(json.dumps(wanted)).items() if stored.get(name) != value]
        if other:
            raise SnapshotError(
                f"{snapshot} belongs to another run, which had other {', '.join(other)}; choose another --snapshot "
                "folder, or remove it to start over"
            )
        self.length = notes["bytes"]
        if not run.out.is_file() or run.out.stat().st_size < notes["bytes"]:
            raise DataError(f"{run.out} is shorter than when {snapshot} was saved; remove that snapshot to start over")
        self.result = FolderResult(**notes["result"], **notes.get("record", {}))
        self.result.resumed = self.result.images
        self.model = load(snapshot, self.network, source=model.source_batches, calibrate=model.calibration)

    @contextmanager
    def predictions_file(self) -> Iterator[IO[str]]:
        """Open the predictions file: new with its header, or cut back to the length that it had at the last save."""
        out = self.run.out
        out.parent.mkdir(parents=True, exist_ok=True)
        with naming(out), out.open("w" if self.length is None else "r+", newline="") as file:
            if self.length is None:
                csv.writer(file).writerow((*COLUMNS, "source") if self.run.with_source else COLUMNS)
            else:
                file.seek(self.length)
                file.truncate()
            yield file

    def where_memory_ran_out(self) -> str:
        """Say how far the run is and what to do; the last snapshot is left as it is."""
        met, size, snapshot = self.result.position, self.run.batch_size, self.run.snapshot
        advice = f"memory ran out after {met} of {len(self.run.images)} images: use a smaller --batch-size than {size}"
        if snapshot is None or not snapshot.exists():
            return advice
        return f"{advice} with another --snapshot folder; the same command again resumes from {snapshot}"

    def readable(self) -> Iterator[tuple[Tensor, Batch]]:
        """Yield the batches that are left; images that cannot be read are noted."""
        for batch in self.run.batches(start=self.result.position):
            self.result.failed += [list(item) for item in batch.failed]
            if len(batch):
                yield batch.images, batch

    def rows(self, step: BatchResult[Batch]) -> list[list[Any]]:
        """Count a batch; return its lines of the predictions file, one for each image that the guard accepted."""
        run, result, batch, guard = self.run, self.result, step.batch, self.model.guard
        result.add(step, guard)
        places = [run.images.location(index) for index in batch.indices.tolist()]
        excluded = {} if guard is None else self.model.last["set_aside"]
        result.failed += [[places[row], reason] for row, reason in excluded.items()]
        accepted = [row for row in range(len(batch)) if row not in excluded]
        result.images += len(accepted)
        if guard is not None:
            result.by_source += len(accepted) * (self.model.last["guard"]["answered_by"] == "source")
        rows: list[list[Any]] = []
        for row in accepted:
            label, predicted = int(batch.labels[row]), step.predictions[row]
            name, known = (run.names[i] if 0 <= i < len(run.names) else "" for i in (predicted, label))
            rows.append([places[row], predicted, name, f"{step.confidences[row]:.6f}", known])
            result.labelled += label >= 0
            result.correct += label == predicted
        if self.source is not None and rows:
            with self.source_work.counted(len(rows)):
                logits = self.source.predict(send(batch.images[accepted], self.source.device))
            rows = [[*row, predicted] for row, predicted in zip(rows, logits.argmax(dim=1).tolist(), strict=True)]
        return rows

    def save(self, file: IO[str]) -> None:
        """Put the predictions on the disk, then the state that made them, then the record of both."""
        file.flush()
        os.fsync(file.fileno())
        run, model, result = self.run, self.model, self.result
        result.estimate = None if model.watch is None else model.estimate().as_dict()
        counts, more = result.parts()
        if run.snapshot is not None:
            notes = {"job": run.identity(), "bytes": file.tell(), "result": counts, "record": more}
            model.save(run.snapshot, notes)
        known = {"classes": list(run.names), "batch_size": run.batch_size, "order": run.order, "seed": run.seed}
        record = known | dict(run.facts) | {"result": counts, "total": len(run.images)} | self._adaptation() | more
        write_file(record_path(run.out), json.dumps({"format": 1} | record, indent=1, default=str))

    def _adaptation(self) -> dict[str, Any]:
        """Return how the model adapts, and what that costs."""
        model = self.model
        return {
            "method": model.method.info.name,
            "settings": model.identity()["settings"],
            "guard": model.guard is not None,
            "trainable_values": sum(parameter.numel() for parameter in model.method.trainable.values()),
            "versions": environment(),
            "gflops_per_image": self.work.gflops_per_image,
            "source_gflops_per_image": self.source_work.gflops_per_image,
            "peak_bytes": peak_memory(),
        }
