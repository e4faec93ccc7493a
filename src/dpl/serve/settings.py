"""What a server can be told: sizes, limits, intervals."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpl.core.errors import SettingError
from dpl.data.images import MAX_PIXELS

__all__ = ["ServeSettings"]


def _limit(default: Any, meaning: str, low: float) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning, "low": low})


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a server; each number has a lowest value, checked when it is made."""

    state: Path
    workers: int = _limit(1, "threads that run the model", 1)
    live_models: int = _limit(4, "copies of the model kept ready; a stream on one needs no loading", 1)
    max_streams_in_memory: int = _limit(64, "streams whose learned state stays in memory; others wait on disk", 1)
    max_streams: int = _limit(10_000, "streams in all", 1)
    snapshot_every: int = _limit(20, "adapted batches between two automatic snapshots of a stream", 1)
    keep_snapshots: int = _limit(5, "automatic and, apart from them, manual snapshots kept of a stream", 1)
    max_batch: int = _limit(64, "images in one request", 1)
    max_body: int = _limit(32 * 2**20, "bytes in one request", 1)
    max_pixels: int = _limit(MAX_PIXELS, "pixels of one image, read from its header before it is decoded", 1)
    queue: int = _limit(64, "requests admitted at once, over all streams; more get 503", 1)
    queue_per_stream: int = _limit(8, "requests admitted at once for one stream; more get 429", 1)
    latency_budget: float = _limit(1.0, "seconds a request may wait; updates that would cost more are skipped", 0)
    timeout: float = _limit(30.0, "seconds until a request that still waits is given up with 503", 0.001)
    history: int = _limit(256, "events remembered of each stream", 1)
    answer: Literal["auto", "first", "after"] = "auto"
    on_storage_failure: Literal["adapt", "stop"] = "adapt"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            low, value = field.metadata.get("low"), getattr(self, field.name)
            if low is not None and not value >= low:
                raise SettingError(f"{field.name}={value}: expected at least {low} ({field.metadata['help']})")
        _choice("answer", self.answer, ("auto", "first", "after"))
        _choice("on_storage_failure", self.on_storage_failure, ("adapt", "stop"))
        if self.live_models < self.workers:
            raise SettingError(f"live_models={self.live_models}: expected at least workers={self.workers}")
        if self.max_streams_in_memory < self.live_models:
            raise SettingError(
                f"max_streams_in_memory={self.max_streams_in_memory}: expected at least live_models={self.live_models}"
            )


def _choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise SettingError(f"{name}={value!r}: expected one of {', '.join(valid)}")
