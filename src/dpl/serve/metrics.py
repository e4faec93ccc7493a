"""Figures for Prometheus. Every server has a registry of its own."""

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
    """What is counted while it happens; what can be read off at any time is in `Gauges`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dpl_requests", "Answered requests by endpoint and status", ["endpoint", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "dpl_request_seconds", "Time to the answer", ["endpoint"], registry=self.registry, buckets=_SECONDS
        )
        self.images = self._counter("dpl_images", "Images predicted")
        self.adaptations = Counter(
            "dpl_adaptations", "Batches by what adaptation did with them", ["result"], registry=self.registry
        )
        self.guard = Counter("dpl_guard_actions", "What the guard did", ["action"], registry=self.registry)
        self.swaps = self._counter("dpl_swaps", "Streams put on a live model")
        self.spills = self._counter("dpl_spills", "Streams put to disk to free memory")
        self.cancelled = self._counter("dpl_cancelled", "Requests given up by their client before they ran")
        self.snapshots = Counter("dpl_snapshots", "Snapshots by result", ["result"], registry=self.registry)
        self.snapshot_seconds = Histogram(
            "dpl_snapshot_seconds", "Time to write a snapshot", registry=self.registry, buckets=_SECONDS
        )
        self.refused_snapshots = self._counter("dpl_refused_snapshots", "Damaged snapshots met")
        self.failures = self._counter("dpl_failures", "Jobs that ended in an unexpected error")

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self.registry)

    def note_written(self, good: bool, seconds: float) -> None:
        """Count a snapshot."""
        self.snapshots.labels("written" if good else "failed").inc()
        if good:
            self.snapshot_seconds.observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class Gauges(Collector):
    """Reads the present state of the server when Prometheus asks; streams on disk are only counted."""

    def __init__(
        self, streams: Callable[[], list["Stream"]], facts: Callable[[], dict[str, tuple[str, float]]]
    ) -> None:
        self._streams, self._facts = streams, facts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return one family for each figure."""
        for name, (meaning, value) in self._facts().items():
            yield GaugeMetricFamily(name, meaning, value=value)
        yield from _by_stream([stream for stream in self._streams() if stream.delta is not None])


def _by_stream(streams: Iterable["Stream"]) -> Iterator[GaugeMetricFamily]:
    figures: dict[str, tuple[str, Callable[[Stream], float]]] = {
        "dpl_stream_confidence": ("Mean confidence of the last batch", lambda s: s.confidence or 0.0),
        "dpl_stream_drift": ("Relative change of the weights at the last look", lambda s: s.drift),
        "dpl_stream_frozen": ("1 while the source answers instead", lambda s: float(s.guard.get("frozen", False))),
        "dpl_stream_unsaved_batches": ("Adapted batches a crash would lose", lambda s: s.unsaved),
        "dpl_stream_adapted_batches": ("Batches on which adaptation ran", lambda s: s.adapted),
        "dpl_stream_skipped_batches": ("Batches not adapted to, for load or storage", lambda s: s.skipped),
    }
    for name, (meaning, read) in figures.items():
        family = GaugeMetricFamily(name, meaning, labels=["stream"])
        for stream in streams:
            family.add_metric([stream.id], read(stream))
        yield family
