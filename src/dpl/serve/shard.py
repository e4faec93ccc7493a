"""Which part of a divided server a stream belongs to."""

import hashlib
from dataclasses import dataclass

from dpl.core.errors import SettingError

__all__ = ["WHOLE", "Shard", "owner"]


def owner(stream_id: str, count: int) -> int:
    """Return the part that owns a stream, the same in every process and on every machine.

    Each part draws a number from the stream's name and the highest one wins: with one part more, only the streams that
    go to the new part move.
    """
    return max(range(count), key=lambda part: hashlib.sha256(f"{part}/{stream_id}".encode()).digest())


@dataclass(frozen=True)
class Shard:
    """One of `count` parts: the streams of which `index` is the owner."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise SettingError(f"part {self.index} of {self.count}: expected 0 to {self.count - 1}")

    def owns(self, stream_id: str) -> bool:
        """Say whether a stream is one of this part's."""
        return owner(stream_id, self.count) == self.index


WHOLE = Shard(0, 1)
