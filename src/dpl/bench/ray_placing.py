"""Files that a unit needs, brought to the machine that runs it, once for all processes there.

A parcel is told by its files' names, sizes and times. A machine that sees the same files at the same place, as on a
shared file system, uses them there; another one fetches them piece by piece into a folder of its own.
"""

import fcntl
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dpl.bench.context import BenchContext
from dpl.bench.unit import Unit
from dpl.core.errors import DataError, DplError
from dpl.data import Benchmark

__all__ = ["Parcel", "absolute", "data_parcel", "file_parcel", "place"]

_PART = 32 << 20  # bytes that travel at once
_LOOKED_AT = 1000  # of more files than that, evenly spread ones are compared

Piece = tuple[str, int, int]  # name, first byte, number of bytes
Fetch = Callable[[int], list[tuple[str, bytes]]]


def absolute(context: BenchContext) -> BenchContext:
    """Return the context as processes that start in another folder need it."""
    return replace(
        context,
        data=context.data.absolute(),
        files={digest: Path(path).absolute() for digest, path in context.files.items()},
        cache=None if context.cache is None else context.cache.absolute(),
        decoded=None if context.decoded is None else context.decoded.absolute(),
    )


@dataclass(frozen=True)
class Parcel:
    """Files below one folder: name, size and time of each."""

    root: Path
    files: tuple[tuple[str, int, int], ...]

    @cached_property
    def key(self) -> str:
        """The name of the parcel's folder on another machine."""
        return hashlib.sha256(repr(self.files).encode()).hexdigest()[:24]

    def lies_at(self, root: Path) -> bool:
        """Say whether these files lie below `root`, by name and size."""
        step = max(1, len(self.files) // _LOOKED_AT)
        try:
            return all((root / name).stat().st_size == size for name, size, _ in self.files[::step])
        except OSError:
            return False

    @cached_property
    def parts(self) -> list[list[Piece]]:
        """What travels at once: many small files, or a piece of a large one."""
        parts: list[list[Piece]] = [[]]
        room = _PART
        for name, size, _ in self.files:
            for start in range(0, max(size, 1), _PART):
                length = min(_PART, size - start)
                if length > room:
                    parts.append([])
                    room = _PART
                parts[-1].append((name, start, length))
                room -= length
        return parts

    def read(self, number: int) -> list[tuple[str, bytes]]:
        """Return the bytes of a part, by file."""
        return [(name, _read(self.root / name, start, length)) for name, start, length in self.parts[number]]


def _read(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(length)
    if len(data) != length:
        raise DataError(f"{path} became shorter while it was copied to another machine; run again")
    return data


def file_parcel(path: Path) -> Parcel:
    """Return the parcel of one file."""
    status = path.stat()
    return Parcel(path.parent, ((path.name, status.st_size, status.st_mtime_ns),))


def data_parcel(units: Iterable[Unit], context: BenchContext) -> Parcel:
    """Return the files of the data sets that the units need: of the data folder only the entries that hold them."""
    chosen = {unit.dataset: unit for unit in units}
    wanted: set[Path] = set()
    for unit in chosen.values():
        wanted |= _entries(unit, context)
    for source in {unit.source for unit in units if unit.source is not None}:
        paths = [context.data / path for path in source.domains] if source.dataset == "folder" else []
        wanted |= set(paths) or _entries(chosen.get(source.dataset), context)
    below = [path for path in wanted if path.is_relative_to(context.data)]  # what lies elsewhere, all nodes must see
    return Parcel(context.data, tuple(_listed(context.data, below)))


def _entries(unit: Unit | None, context: BenchContext) -> set[Path]:
    """Return the one entry of the data folder in which a data set is found just as in all of it, or all entries."""
    everything = sorted(context.data.iterdir())
    if unit is None:
        return set(everything)
    with warnings.catch_warnings(), TemporaryDirectory(prefix="dpl-view-") as view:
        warnings.simplefilter("ignore")
        whole = _opened(unit, context)
        for entry in everything:
            link = Path(view) / entry.name
            link.symlink_to(entry.absolute())
            if _same(_opened(unit, BenchContext(Path(view), context.files)), whole):
                return {entry}
            link.unlink()
    return set(everything)


def _opened(unit: Unit, context: BenchContext) -> Benchmark | None:
    severities = unit.severities[:1] if unit.corrupt is None else ()
    options = {name: context.file(digest) for name, digest in unit.files.items()}
    corrupted = {"domains": unit.domains, "severity": severities[0]} if severities else {}
    try:
        return context.open(unit.dataset, **options, **corrupted).benchmark
    except (DplError, OSError):
        return None


def _same(one: Benchmark | None, other: Benchmark | None) -> bool:
    if one is None or other is None or list(one.domains) != list(other.domains):
        return False
    return all(np.array_equal(one[name].labels, other[name].labels) for name in one.domains)


def _listed(root: Path, entries: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for entry in sorted(entries):
        walked = os.walk(entry, followlinks=True)
        paths = [entry] if entry.is_file() else [Path(folder) / name for folder, _, names in walked for name in names]
        for path in sorted(paths):
            status = path.stat()
            yield str(path.relative_to(root)), status.st_size, status.st_mtime_ns


def place(parcel: Parcel, folder: Path, fetch: Fetch) -> Path:
    """Return where the parcel lies below `folder`; the first process that asks fetches it, the others wait."""
    target = folder / parcel.key
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder / f"{parcel.key}.lock"):
        if not target.exists():
            draft = folder / f".{parcel.key}.tmp"
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
            for number in range(len(parcel.parts)):
                _write(draft, fetch(number))
            os.rename(draft, target)
    return target


def _write(folder: Path, contents: list[tuple[str, bytes]]) -> None:
    """Add pieces to their files; a file's pieces come in order."""
    for name, data in contents:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for one's turn; the system ends it with the process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
