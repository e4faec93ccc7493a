"""Figures of a running stream: what the last step said in numbers, and TensorBoard for those who want to look."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpl.core.extras import optional

__all__ = ["Board", "numbers"]


def numbers(last: Mapping[str, Any]) -> dict[str, float]:
    """Return the facts of a step that are numbers, such as its loss or the share of confident samples."""
    facts = {name: last[name] for name in last}
    return {name: float(value) for name, value in facts.items() if isinstance(value, (bool, int, float))}


class Board:
    """Scalars for TensorBoard: a folder with one run for each stream."""

    def __init__(self, folder: Path) -> None:
        self._kind = optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # images of finished segments, and of the one that runs

    def write(self, run: str, images: int, scalars: Mapping[str, float]) -> None:
        """Write some scalars; `images` counts those of a segment, and segments follow one another."""
        before, latest = self._seen.get(run, (0, 0))
        if images < latest:
            before += latest
        self._seen[run] = (before, images)
        if run not in self._writers:
            self._writers[run] = self._kind(str(self._folder / _plain(run)))
        for name, value in scalars.items():
            self._writers[run].add_scalar(name, value, before + images)

    def end(self, run: str) -> None:
        """Write out what is left of a run."""
        if run in self._writers:
            self._writers.pop(run).close()

    def close(self) -> None:
        """Write out what is left of all runs."""
        for run in [*self._writers]:
            self.end(run)


def _plain(name: str) -> str:
    """Return a name that every file system takes."""
    return "".join(c if c.isalnum() or c in "-_.,@+= " else "_" for c in name).strip()[:120] or "run"
