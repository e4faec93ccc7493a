"""What each method cost: time, passes through the network, memory, updates."""

from collections.abc import Sequence
from dataclasses import dataclass

from dpl.report.model import Experiment
from dpl.reproduce.layouts import Row

__all__ = ["Cost", "costs"]


@dataclass(frozen=True)
class Cost:
    """Means over all images of a method; None where the run did not record it."""

    method: str
    milliseconds: float | None
    slower: float | None
    """Times the source's time."""
    passes: float | None
    """Arithmetic in forward passes of the source model."""
    gflops: float | None
    memory: float | None
    """Peak in MiB."""
    batches: int
    updates: int
    trained: int | None


def costs(experiment: Experiment) -> list[Cost]:
    """Return the costs of every method."""
    reference = experiment.of(experiment.reference) if experiment.reference else []
    base_time, base_work = _mean(reference, "seconds_per_image"), _mean(reference, "gflops_per_image")
    return [_cost(method, experiment.of(method), base_time, base_work) for method in experiment.methods]


def _cost(method: str, rows: Sequence[Row], base_time: float | None, base_work: float | None) -> Cost:
    seconds, gflops = _mean(rows, "seconds_per_image"), _mean(rows, "gflops_per_image")
    peaks = [row["peak_bytes"] for row in rows if row.get("peak_bytes")]
    return Cost(
        method=method,
        milliseconds=None if seconds is None else 1000 * seconds,
        slower=_ratio(seconds, base_time),
        passes=_ratio(gflops, base_work),
        gflops=gflops,
        memory=max(peaks) / 2**20 if peaks else None,
        batches=sum(row.get("batches") or 0 for row in rows),
        updates=sum(row.get("updates") or 0 for row in rows),
        trained=next((row["trainable_values"] for row in rows if row.get("trainable_values") is not None), None),
    )


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean over images."""
    known = [(row[name], row["n"]) for row in rows if row.get(name) is not None and row.get("n")]
    return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
