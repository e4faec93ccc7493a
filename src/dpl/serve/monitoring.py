"""What operators see: log lines that name their stream, and figures for Prometheus."""

import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dpl.serve.store import size_of

if TYPE_CHECKING:
    from dpl.serve.server import Server

__all__ = ["CURRENT", "Metrics", "configure_logging"]

CURRENT: ContextVar[str | None] = ContextVar("stream", default=None)  # the stream that this thread works on
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OF_STREAM = {
    "confidence": "Mean confidence of the last batch",
    "drift": "Relative change of the weights when last measured",
    "frozen": "1 while the guard serves the source model",
    "unsaved_batches": "Adapted batches a crash would lose",
    "adapted_batches": "Batches that the stream adapted to",
    "skipped_batches": "Batches not adapted to because of load or storage",
    "estimated_accuracy": "Estimated accuracy in percent",
    "estimated_low": "Lower end of its 90 % interval",
    "estimated_high": "Upper end of its 90 % interval",
    "estimated_source": "Estimated accuracy in percent of the source model on the same images",
}


def _name_stream(record: logging.LogRecord) -> bool:
    """Add the stream; the guard and the methods do not know it."""
    stream = getattr(record, "stream", None) or CURRENT.get()
    vars(record).update(stream=stream, subject=f"stream {stream}: " if stream else "")
    return True


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON document in one line."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "stream": getattr(record, "stream", None),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(form: str) -> None:
    """Write the log to standard error, as `text` or `json`."""
    handler = logging.StreamHandler()
    handler.addFilter(_name_stream)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(subject)s%(message)s")
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class Metrics(Collector):
    """Counters and histograms, and at each request the present state of a server; streams on disk are only counted."""

    def __init__(self, server: "Server | None" = None) -> None:
        self.registry, self._server = CollectorRegistry(), server
        counter, seconds = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("dpl_requests", "Responses by endpoint and status", ["endpoint", "status"])
        self.seconds = seconds("dpl_request_seconds", "Time to the response", ["endpoint"], buckets=_SECONDS)
        self.images = counter("dpl_images", "Images predicted")
        self.adaptations = counter("dpl_adaptations", "Batches by result of the adaptation", ["result"])
        self.guard = counter("dpl_guard_actions", "Actions of the guard", ["action"])
        self.spills = counter("dpl_spills", "Streams moved to disk to free memory")
        self.cancelled = counter("dpl_cancelled", "Requests cancelled before they ran")
        self.snapshots = counter("dpl_snapshots", "Snapshots by result", ["result"])
        self.refused_snapshots = counter("dpl_refused_snapshots", "Damaged snapshots")
        self.failures = counter("dpl_failures", "Jobs that ended in an unexpected error")
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return one family per figure of the server, if there is one."""
        if (server := self._server) is None:
            return
        streams = server.streams()
        for name, meaning, value in (
            ("dpl_streams", "Streams known", len(streams)),
            ("dpl_delta_bytes", "Memory used by the states of streams", sum(size_of(it.difference) for it in streams)),
            ("dpl_queue", "Requests accepted and not yet answered", server.admitted()),
            ("dpl_storage_ok", "1 while the state folder can be written", server.writer.problem is None),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        figures = [_figures(stream.describe(server)) for stream in streams if stream.difference is not None]
        for name, meaning in _OF_STREAM.items():
            family = GaugeMetricFamily(f"dpl_stream_{name}", meaning, labels=["stream"])
            for known in figures:
                if known.get(name) is not None:
                    family.add_metric([known["stream"]], known[name])
            yield family


def _figures(status: dict[str, Any]) -> dict[str, Any]:
    estimate = {f"estimated_{name}": value for name, value in (status["estimate"] or {}).items()}
    return {**status, **estimate, "frozen": status["guard"].get("frozen", False)}
