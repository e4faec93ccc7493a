"""Figures for Prometheus; every server has its own registry."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from dpl.serve.stream import Stream

__all__ = ["Gauges", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters and histograms; `Gauges` has the figures that can be read at any time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dpl_requests", "Responses by endpoint and status", ["endpoint", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "dpl_request_seconds", "Time to the response", ["endpoint"], registry=self.registry, buckets=_SECONDS
        )
        self.images = self._counter("dpl_images", "Images predicted")
        self.adaptations = Counter(
            "dpl_adaptations", "Batches by result of the adaptation", ["result"], registry=self.registry
        )
        self.guard = Counter("dpl_guard_actions", "Actions of the guard", ["action"], registry=self.registry)
        self.swaps = self._counter("dpl_swaps", "Streams put on a live model")
        self.spills = self._counter("dpl_spills", "Streams moved to disk to free memory")
        self.cancelled = self._counter("dpl_cancelled", "Requests cancelled before they ran")
        self.snapshots = Counter("dpl_snapshots", "Snapshots by result", ["result"], registry=self.registry)
        self.snapshot_seconds = Histogram(
            "dpl_snapshot_seconds", "Time to write a snapshot", registry=self.registry, buckets=_SECONDS
        )
        self.refused_snapshots = self._counter("dpl_refused_snapshots", "Damaged snapshots")
        self.failures = self._counter("dpl_failures", "Jobs that ended in an unexpected error")

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self.registry)

    def note_written(self, good: bool, seconds: float) -> None:
        """Count a snapshot."""
        self.snapshots.labels("written" if good else "failed").inc()
        if good:
            self.snapshot_seconds.observe(seconds)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self.registry)


class Gauges(Collector):
    """Reads the present state of the server at each request; streams on disk are only counted."""

    def __init__(
        self, streams: Callable[[], list["Stream"]], facts: Callable[[], dict[str, tuple[str, float]]]
    ) -> None:
        self._streams, self._facts = streams, facts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return one family per figure."""
        for name, (meaning, value) in self._facts().items():
            yield GaugeMetricFamily(name, meaning, value=value)
        yield from _by_stream([stream for stream in self._streams() if stream.difference is not None])


def _by_stream(streams: Iterable["Stream"]) -> Iterator[GaugeMetricFamily]:
    figures: dict[str, tuple[str, Callable[[Stream], float]]] = {
        "dpl_stream_confidence": ("Mean confidence of the last batch", lambda s: s.confidence or 0.0),
        "dpl_stream_drift": ("Relative change of the weights when last measured", lambda s: s.drift),
        "dpl_stream_frozen": (
            "1 while the guard serves the source model",
            lambda s: float(s.guard.get("frozen", False)),
        ),
        "dpl_stream_unsaved_batches": ("Adapted batches a crash would lose", lambda s: s.unsaved),
        "dpl_stream_adapted_batches": ("Batches that the stream adapted to", lambda s: s.adapted),
        "dpl_stream_skipped_batches": ("Batches not adapted to because of load or storage", lambda s: s.skipped),
    }
    for name, (meaning, read) in figures.items():
        family = GaugeMetricFamily(name, meaning, labels=["stream"])
        for stream in streams:
            family.add_metric([stream.id], read(stream))
        yield family
