"""Figures for Prometheus; every server has its own registry."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from dpl.serve.engine import Engine

__all__ = ["Gauges", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OF_STREAM: dict[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {  # read from the stream's status
    "dpl_stream_confidence": ("Mean confidence of the last batch", lambda s: s["confidence"] or 0.0),
    "dpl_stream_drift": ("Relative change of the weights when last measured", lambda s: s["drift"]),
    "dpl_stream_frozen": ("1 while the guard serves the source model", lambda s: s["guard"].get("frozen", False)),
    "dpl_stream_unsaved_batches": ("Adapted batches a crash would lose", lambda s: s["unsaved_batches"]),
    "dpl_stream_adapted_batches": ("Batches that the stream adapted to", lambda s: s["adapted_batches"]),
    "dpl_stream_skipped_batches": ("Batches not adapted to because of load or storage", lambda s: s["skipped_batches"]),
    "dpl_stream_estimated_accuracy": ("Estimated accuracy in percent", lambda s: s["estimate"]["accuracy"]),
    "dpl_stream_estimated_low": ("Lower end of its 90 % interval", lambda s: s["estimate"]["low"]),
    "dpl_stream_estimated_high": ("Upper end of its 90 % interval", lambda s: s["estimate"]["high"]),
    "dpl_stream_estimated_source": (
        "Estimated accuracy in percent of the source model on the same images",
        lambda s: s["estimate"]["source"],
    ),
}


class Metrics:
    """Counters and histograms; `Gauges` has the figures that can be read at any time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, seconds = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("dpl_requests", "Responses by endpoint and status", ["endpoint", "status"])
        self.seconds = seconds("dpl_request_seconds", "Time to the response", ["endpoint"], buckets=_SECONDS)
        self.images = counter("dpl_images", "Images predicted")
        self.adaptations = counter("dpl_adaptations", "Batches by result of the adaptation", ["result"])
        self.guard = counter("dpl_guard_actions", "Actions of the guard", ["action"])
        self.swaps = counter("dpl_swaps", "Streams put on a live model")
        self.spills = counter("dpl_spills", "Streams moved to disk to free memory")
        self.cancelled = counter("dpl_cancelled", "Requests cancelled before they ran")
        self.snapshots = counter("dpl_snapshots", "Snapshots by result", ["result"])
        self.snapshot_seconds = seconds("dpl_snapshot_seconds", "Time to write a snapshot", buckets=_SECONDS)
        self.refused_snapshots = counter("dpl_refused_snapshots", "Damaged snapshots")
        self.failures = counter("dpl_failures", "Jobs that ended in an unexpected error")

    def note_written(self, good: bool, seconds: float) -> None:
        """Count a snapshot."""
        self.snapshots.labels("written" if good else "failed").inc()
        if good:
            self.snapshot_seconds.observe(seconds)


class Gauges(Collector):
    """Reads the present state of the server at each request; streams on disk are only counted."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return one family per figure."""
        engine, streams = self._engine, self._engine.streams()
        in_memory = [(stream, state) for stream in streams if (state := stream.difference) is not None]
        for name, meaning, value in (
            ("dpl_streams", "Streams known", len(streams)),
            ("dpl_streams_in_memory", "Streams whose state is in memory", len(in_memory)),
            ("dpl_delta_bytes", "Memory used by the states of streams", sum(state.size for _, state in in_memory)),
            ("dpl_queue", "Requests accepted and not yet answered", engine.admitted),
            ("dpl_storage_ok", "1 while the state folder can be written", engine.context.writer.problem is None),
            ("dpl_step_seconds", "Time of one adaptation, smoothed", engine.context.step_seconds),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        statuses = [engine.describe(stream) for stream, _ in in_memory]
        for name, (meaning, read) in _OF_STREAM.items():
            family = GaugeMetricFamily(name, meaning, labels=["stream"])
            for status in statuses:
                if "estimated" not in name or (status["estimate"] or {}).get("accuracy") is not None:
                    family.add_metric([status["stream"]], read(status))
            yield family
