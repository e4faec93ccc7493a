"""Run one unit: build its stream, wrap the network, let it predict and adapt, and say what happened."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.bench.context import BenchContext, PreparedModel
from dpl.bench.images import StreamedDomain, open_outliers, open_parts, segment_batches, segments
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.data import Batch
from dpl.runs.costs import Pace, environment, forget_peak, peak_memory
from dpl.runs.online import OnlineResult, evaluate
from dpl.streams import Segment

__all__ = ["Outcome", "Record", "run_unit", "unit_accuracy"]

Record = dict[str, Any]
OnBatch = Callable[[OnlineResult], None]
_REASONS = 8  # kept of those for which batches brought no update


@dataclass(frozen=True)
class Outcome:
    """One record for each segment, and for each image what was predicted, in stream order."""

    records: list[Record]
    arrays: dict[str, NDArray[Any]]


def unit_accuracy(records: Sequence[Record]) -> float:
    """Return the mean of the online accuracies of a unit's segments, in percent."""
    return sum(float(record["accuracy"]) for record in records) / len(records)


@dataclass
class _Reader:
    """Hands a stream's batches to the model and remembers which images they were."""

    batches: Iterator[Batch]
    rows: list[int] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            self.failed += batch.failed
            self.rows += batch.indices.tolist()
            if len(batch):
                yield batch.images.contiguous(memory_format=torch.channels_last), batch.labels


def run_unit(unit: Unit, context: BenchContext, on_batch: OnBatch = lambda result: None) -> Outcome:
    """Run a unit from the source model on; the same unit on the same data gives the same figures."""
    parts = open_parts(unit, context)
    outliers = open_outliers(unit, context, parts[0])
    order = segments(unit, parts, outliers)
    prepared = context.prepared(unit, parts)
    parts += [] if outliers is None else [outliers]
    shared = _shared(unit, parts, prepared)
    records: list[Record] = []
    columns: list[dict[str, NDArray[Any]]] = []
    for number, segment in enumerate(order):
        if segment.reset_before:
            prepared.model.reset()
        forget_peak()
        reader = _Reader(segment_batches(segment, parts, unit, context))
        pace = None if unit.stream_speed is None else Pace(unit.stream_speed)
        result = evaluate(prepared.model, reader, on_batch, pace)
        if not result.labels:
            raise DataError(f"{segment.name}: not one image could be read; the first: {': '.join(reader.failed[0])}")
        column = _predictions(number, segment, parts, reader, result)
        columns.append(column)
        records.append(_segment_record(segment, parts, reader, result, column) | shared)
    return Outcome(records, {name: np.concatenate([c[name] for c in columns]) for name in columns[0]})


def _predictions(
    number: int, segment: Segment, parts: Sequence[StreamedDomain], reader: _Reader, result: OnlineResult
) -> dict[str, NDArray[Any]]:
    """Return what is kept of each image of a known class: two bytes for a class, two for a probability.

    That of the true class is kept as its logarithm, so that the smallest ones still differ.
    """
    members = sorted(set(segment.indices[:, 0].tolist()))
    starts = np.cumsum([0, *(len(parts[member].images) for member in members)])
    rows = np.asarray(reader.rows, dtype=np.int64)
    place = np.searchsorted(starts, rows, side="right") - 1
    samples = np.concatenate([parts[member].positions for member in members])[rows]
    columns: dict[str, NDArray[Any]] = {
        "segment": np.full(len(rows), number, dtype=np.uint16),
        "domain": np.asarray(members, dtype=np.uint16)[place],
        "sample": samples.astype(np.int32),
        "label": np.asarray(result.labels).astype(np.uint16),
        "prediction": np.asarray(result.predictions, dtype=np.uint16),
        "confidence": np.asarray(result.confidences, dtype=np.float16),
        "log_likelihood": np.asarray(result.log_likelihoods, dtype=np.float16),
    }
    return {name: column[result.known] for name, column in columns.items()}


def _segment_record(
    segment: Segment,
    parts: Sequence[StreamedDomain],
    reader: _Reader,
    result: OnlineResult,
    column: dict[str, NDArray[Any]],
) -> Record:
    classes = len(parts[0].images.classes)
    known = result.known
    labels, correct = np.asarray(result.labels)[known], result.correct[known]
    counts, hits = (np.bincount(some, minlength=classes).tolist() for some in (labels, labels[correct]))
    by_domain = {
        parts[member].domain.title: 100.0 * float(correct[column["domain"] == member].mean())
        for member in np.unique(column["domain"]).tolist()
    }
    return {
        "segment": segment.name,
        "severity": segment.severity,
        "visit": segment.visit,
        "n": len(labels),
        "outlier_auroc": _outlier_auroc(np.asarray(result.confidences), known),
        "accuracy": result.accuracy,
        "error": 100.0 - result.accuracy,
        "confidence": float(np.mean(np.asarray(result.confidences)[known])),
        "nll": -float(np.mean(np.asarray(result.log_likelihoods)[known])),
        "per_class": [round(100.0 * h / c, 4) if c else None for h, c in zip(hits, counts, strict=True)],
        "per_class_n": counts,
        "by_domain": by_domain,
        "batches": result.batches,
        "updates": result.updates,
        "skipped": result.batches - result.updates,
        "skipped_because": dict(result.reasons.most_common(_REASONS)),
        "unreadable": len(reader.failed),
        "unreadable_first": [": ".join(entry) for entry in reader.failed[:3]],
        "seconds_per_image": result.seconds / len(known),
        "gflops_per_image": result.work.gflops_per_image,
        "peak_bytes": peak_memory(),
    }


def _outlier_auroc(confidences: NDArray[np.float64], known: NDArray[np.bool_]) -> float | None:
    """Return the probability, in percent, that a known image is more confident than an outlier; None without any."""
    inside, outside = confidences[known], np.sort(confidences[~known])
    if len(inside) == 0 or len(outside) == 0:
        return None
    below, not_above = (np.searchsorted(outside, inside, side=side) for side in ("left", "right"))
    return 100.0 * float((below + not_above).mean()) / (2 * len(outside))


def _shared(unit: Unit, parts: Sequence[StreamedDomain], prepared: PreparedModel) -> Record:
    """Return what all segments of a unit have in common."""
    model, names = prepared.model, prepared.model.trainable
    return {
        "unit": unit.key,
        "classes": list(parts[0].images.classes),
        "regenerated": unit.corrupt is not None,
        "output": getattr(model.settings, "output", "before"),
        "norm": model.settings.norm,
        "trainable_tensors": len(names),
        "trainable_values": sum(parameter.numel() for parameter in model.method.trainable.values()),
        "trainable_sha256": hashlib.sha256("\n".join(names).encode()).hexdigest(),
        "source_data": prepared.source,
        "prepare_seconds": prepared.seconds,
        "data": {part.domain.title: {"streamed": len(part.images), "whole": part.whole} for part in parts},
        "data_notes": list(dict.fromkeys(note for part in parts for note in part.notes)),
        "layout": "channels_last",
        "device": model.device.type,
        "versions": environment(),
    }
