"""The folder of a training run: what is in it is complete, whenever the run was stopped.

train.json        settings, data, versions, result: all that is needed to repeat the run
log.jsonl         the learning curve, one line per validation
best.safetensors  the weights with the highest mean validation accuracy
last/             the state from which the run goes on
curves.png        the learning curve drawn, where matplotlib is installed
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialise_tensors
from torch import Tensor

from dpl.core.errors import DataError, SettingError, SnapshotError
from dpl.snapshot import read_snapshot, write_snapshot

__all__ = ["TrainFolder", "opened"]

Record = dict[str, Any]


class TrainFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.best = path / "best.safetensors"
        self.curves = path / "curves.png"
        self._about = path / "train.json"
        self._log = path / "log.jsonl"
        self._last = path / "last"

    def describe(self, record: Record) -> None:
        """Write train.json."""
        _write(self._about, json.dumps(record, indent=2).encode())

    def description(self) -> Record | None:
        """Return train.json, or None if no run has begun here."""
        if not self._about.exists():
            return None
        try:
            record = json.loads(self._about.read_bytes())
            whole = isinstance(record["settings"], dict) and isinstance(record["sessions"], list)
            if not whole or not isinstance(record["data"]["images_sha256"], str):
                raise TypeError("not what a run writes")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._about} is damaged ({error}); choose another folder") from error
        return record  # type: ignore[no-any-return]

    def write_log(self, history: list[Record]) -> None:
        """Write the learning curve anew: a run that was killed may have logged more than it will go on from."""
        _write(self._log, "".join(_line(entry) for entry in history).encode())

    def append_log(self, entry: Record) -> None:
        """Add one line to the learning curve."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(_line(entry))

    def write_best(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights under their plain names."""
        _write(self.best, serialise_tensors(dict(weights)))

    def save(self, progress: Record, tensors: Mapping[str, Tensor]) -> None:
        """Write the state to go on from; the one before it stays until this one is complete."""
        write_snapshot(self._last, progress, tensors)

    def saved(self) -> tuple[Record, dict[str, Tensor]] | None:
        """Return what `save` wrote, or None if nothing was saved yet."""
        if not (self._last.exists() or self._last.with_name(".last.previous").exists()):
            return None
        try:
            return read_snapshot(self._last)
        except SnapshotError as error:
            raise DataError(f"{error}. Remove {self._last} to begin this run again") from error


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TrainFolder]:
    """Open the folder for one run at a time; files of something else in it are a reason to refuse it."""
    folder = Path(path).resolve()
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"out={folder} is a file; expected a folder for the run")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.json").exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise SettingError(f"out={folder} holds other files and no training run; choose a new folder")
    with _lock(folder):
        for draft in folder.glob(".*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
        yield TrainFolder(folder)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep a second run out; the system lifts the lock when the process ends, however it ends."""
    if find_spec("fcntl") is None:  # not a Unix system
        yield
        return
    import fcntl

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingError(f"out={folder} is in use by another run; wait for it or choose a new folder") from error
        yield


def _line(entry: Record) -> str:
    return json.dumps(entry) + "\n"


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it is seen whole or not at all."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
