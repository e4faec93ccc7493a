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
    queue: int = setting(64, "requests accepted at once, over all streams; more get 503", low=1)
    queue_per_stream: int = setting(8, "requests accepted at once for one stream; more get 429", low=1)
    latency_budget: float = setting(1.0, "seconds a request may wait; adaptation that exceeds it is skipped", low=0)
    timeout: float = setting(30.0, "seconds until a request that still waits gets 503", low=0.001)
    events_kept: int = setting(256, "events kept per stream", low=1)
    answer: Literal["auto", "first", "after"] = setting(
        "auto", "first: respond, then adapt; after: respond when adapted; auto: first if the method allows it"
    )
    on_storage_failure: Literal["adapt", "stop"] = setting(
        "adapt", "while the state folder cannot be written: continue to adapt, or stop adapting"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.live_models < self.workers:
            raise SettingError(f"live_models={self.live_models}: expected at least workers={self.workers}")
        if self.max_streams_in_memory < self.live_models:
            raise SettingError(
                f"max_streams_in_memory={self.max_streams_in_memory}: expected at least live_models={self.live_models}"
            )


@dataclass(frozen=True, kw_only=True)
class RaySettings(Checked):
    """Number, size and place of the replicas."""

    replicas: int = setting(2, "processes", low=1)
    replica_cpus: float = setting(1.0, "CPUs of each process", low=0)
    replica_gpus: float = setting(0.0, "GPUs of each process", low=0)
    address: str | None = setting(None, "address of a running cluster (default: start one here, stop it at the end)")
