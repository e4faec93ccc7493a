"""Run one unit: build its stream, wrap the network, let it predict and adapt, and say what happened."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.bench.context import BenchContext
from dpl.bench.images import UnitStream
from dpl.bench.unit import Unit
from dpl.core.errors import DataError
from dpl.model.adaptive import AdaptiveModel
from dpl.runs.costs import Pace, environment, forget_peak, peak_memory
from dpl.runs.online import OnlineResult, evaluate
from dpl.streams import Segment

__all__ = ["Outcome", "Record", "run_unit", "unit_accuracy"]

Record = dict[str, Any]
OnBatch = Callable[[OnlineResult], None]
_REASONS = 8  # kept of those for which batches brought no update


class Outcome(NamedTuple):
    """One record for each segment, and for each image what was predicted, in stream order."""

    records: list[Record]
    arrays: dict[str, NDArray[Any]]


def unit_accuracy(records: Sequence[Record]) -> float:
    """Return the mean of the online accuracies of a unit's segments, in percent."""
    return sum(float(record["accuracy"]) for record in records) / len(records)


def run_unit(unit: Unit, context: BenchContext, on_batch: OnBatch = lambda result: None) -> Outcome:
    """Run a unit from the source model on; the same unit on the same data gives the same figures."""
    stream = UnitStream(unit, context)
    model = context.prepared(stream)
    shared = _shared(stream, model)
    records: list[Record] = []
    columns: list[dict[str, NDArray[Any]]] = []
    for segment in stream.segments:
        if segment.reset_before:
            model.reset()
        forget_peak()
        rows: list[int] = []
        failed: list[str] = []
        pace = None if unit.stream_speed is None else Pace(unit.stream_speed)
        result = evaluate(model, _read(stream, segment, rows, failed), on_batch, pace)
        if not result.labels:
            raise DataError(f"{segment.name}: not one image could be read; the first: {failed[0]}")
        columns.append(_predictions(stream, segment, len(columns), rows, result))
        records.append(_segment_record(stream, segment, result, columns[-1]["domain"], failed) | shared)
    return Outcome(records, {name: np.concatenate([c[name] for c in columns]) for name in columns[0]})


def _read(stream: UnitStream, segment: Segment, rows: list[int], failed: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a segment's images and labels; note the rows of those that were read, and which could not be."""
    for batch in stream.batches(segment):
        failed += map(": ".join, batch.failed)
        rows += batch.indices.tolist()
        if len(batch):
            yield batch.images.contiguous(memory_format=torch.channels_last), batch.labels


def _predictions(
    stream: UnitStream, segment: Segment, number: int, rows: list[int], result: OnlineResult
) -> dict[str, NDArray[Any]]:
    """Return what is kept of each image of a known class: two bytes for a class, two for a probability."""
    members = stream.members(segment)
    domains = np.repeat(np.asarray(list(members), dtype=np.uint16), [len(part.images) for part in members.values()])
    samples = np.concatenate([part.positions for part in members.values()])
    columns: dict[str, NDArray[Any]] = {
        "segment": np.full(len(rows), number, dtype=np.uint16),
        "domain": domains[rows],
        "sample": samples[rows].astype(np.int32),
        "label": np.asarray(result.labels).astype(np.uint16),
        "prediction": np.asarray(result.predictions, dtype=np.uint16),
        "confidence": np.asarray(result.confidences, dtype=np.float16),
        "log_likelihood": np.asarray(result.log_likelihoods, dtype=np.float16),  # its smallest values still differ
    }
    return {name: column[result.known] for name, column in columns.items()}


def _segment_record(
    stream: UnitStream, segment: Segment, result: OnlineResult, domains: NDArray[Any], failed: list[str]
) -> Record:
    classes = len(stream.parts[0].images.classes)
    known, confidences = result.known, np.asarray(result.confidences)
    labels, correct = np.asarray(result.labels)[known], result.correct[known]
    counts, hits = (np.bincount(some, minlength=classes).tolist() for some in (labels, labels[correct]))
    by_domain = {
        stream.parts[number].domain.title: 100.0 * float(correct[domains == number].mean())
        for number in np.unique(domains).tolist()
    }
    return {
        "segment": segment.name,
        "severity": segment.severity,
        "visit": segment.visit,
        "n": len(labels),
        "outlier_auroc": _outlier_auroc(confidences, known),
        "accuracy": result.accuracy,
        "error": 100.0 - result.accuracy,
        "confidence": float(np.mean(confidences[known])),
        "nll": -float(np.mean(np.asarray(result.log_likelihoods)[known])),
        "per_class": [round(100.0 * h / c, 4) if c else None for h, c in zip(hits, counts, strict=True)],
        "per_class_n": counts,
        "by_domain": by_domain,
        "batches": result.batches,
        "updates": result.updates,
        "skipped": result.batches - result.updates,
        "skipped_because": dict(result.reasons.most_common(_REASONS)),
        "unreadable": len(failed),
        "unreadable_first": failed[:3],
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


def _shared(stream: UnitStream, model: AdaptiveModel) -> Record:
    names, parts = model.trainable, stream.parts
    return {
        "unit": stream.unit.key,
        "classes": list(parts[0].images.classes),
        "regenerated": stream.unit.corrupt is not None,
        "output": getattr(model.settings, "output", "before"),
        "norm": model.settings.norm,
        "trainable_tensors": len(names),
        "trainable_values": sum(parameter.numel() for parameter in model.method.trainable.values()),
        "trainable_sha256": hashlib.sha256("\n".join(names).encode()).hexdigest(),
        "source_data": str(model.source_batches or "none"),
        "data": {part.domain.title: {"streamed": len(part.images), "whole": part.whole} for part in parts},
        "data_notes": list(dict.fromkeys(note for part in parts for note in part.notes)),
        "layout": "channels_last",
        "device": model.device.type,
        "versions": environment(),
    }
