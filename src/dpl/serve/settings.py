"""Server settings: numbers of models and streams, intervals, limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpl.core.errors import SettingError
from dpl.core.settings import Checked, setting
from dpl.data.images import MAX_PIXELS

__all__ = ["RaySettings", "ServeSettings"]


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Checked):
    """Settings of a server."""

    state: Path
    workers: int = setting(1, "threads that run the model", low=1)
    live_models: int = setting(4, "copies of the model; a stream that is on one needs no loading", low=1)
    max_streams_in_memory: int = setting(64, "streams whose state stays in memory; others are on disk", low=1)
    max_streams: int = setting(10_000, "streams in total", low=1)
    snapshot_every: int = setting(20, "adapted batches between two automatic snapshots of a stream", low=1)
    keep_snapshots: int = setting(5, "automatic and, counted separately, manual snapshots kept per stream", low=1)
    max_batch: int = setting(64, "images per request", low=1)
    max_body: int = setting(32 * 2**20, "bytes per request", low=1)
    max_pixels: int = setting(MAX_PIXELS, "pixels per image, read from its header before it is decoded", low=1)
    max_header: int = setting(16 * 2**10, "bytes of a request's header; more get 431", low=256)
    max_header_fields: int = setting(100, "fields of a request's header; more get 431", low=1)
    header_timeout: float = setting(10.0, "seconds until a header is complete, and until a body flows", low=0.001)
    min_rate: int = setting(4 * 2**10, "bytes a second, on average, of a body that flows; slower ones get 408", low=1)
    connections: int = setting(512, "open connections; then those that send no request are closed", low=8)
    connections_per_address: int = setting(128, "the same for one address; raise it behind a proxy", low=4)
    decoders: int = setting(2, "processes that decode images; one token uses all but one of them", low=1)
    decode_seconds: float = setting(10.0, "processor time to decode one request; more get 422", low=0.01)
    decode_memory: int = setting(256 * 2**20, "bytes of memory to decode one request; more get 422", low=2**20)
    queue: int = setting(64, "requests accepted at once, over all streams; more get 503", low=1)
    queue_per_stream: int = setting(8, "requests accepted at once for one stream; more get 429", low=1)
    requests_per_token: int = setting(32, "requests in progress of a token with a prefix; more get 429", low=1)
    uploads_per_token: int = setting(128 * 2**20, "bytes of bodies in memory for one token; more get 429", low=1)
    streams_per_token: int = setting(1_000, "streams of one token with a prefix; more get 429", low=1)
    disk_per_token: int = setting(16 * 2**30, "bytes of snapshots, for new streams of a token with a prefix", low=1)
    latency_budget: float = setting(1.0, "seconds a request may wait; adaptation that exceeds it is skipped", low=0)
    timeout: float = setting(30.0, "seconds until a request that still waits gets 503", low=0.001)
    slow_disk: float = setting(5.0, "seconds of one write until /healthz reports a slow disk", low=0.001)
    stop_seconds: float = setting(30.0, "seconds that a stop may take; what is not on disk by then is lost", low=0)
    on_storage_failure: Literal["adapt", "stop"] = setting(
        "adapt", "while the state folder cannot be written: continue to adapt, or stop adapting"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in (("live_models", "workers"), ("max_streams_in_memory", "live_models")):
            value, least = getattr(self, name), getattr(self, other)
            if value < least:
                raise SettingError(f"{name}={value}: expected at least {other}={least}")


@dataclass(frozen=True, kw_only=True)
class RaySettings(Checked):
    """Number, size and place of the replicas."""

    replicas: int = setting(2, "processes", low=1)
    replica_cpus: float = setting(1.0, "CPUs of each process", low=0)
    replica_gpus: float = setting(0.0, "GPUs of each process", low=0)
    address: str | None = setting(None, "address of a running cluster (default: start one here, stop it at the end)")
