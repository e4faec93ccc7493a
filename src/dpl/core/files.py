"""Files and folders that appear whole or not at all, and locks that end with their process.

Everything is written under a draft name beside its place (`.NAME.*.tmp`), forced to the disk, and renamed as the last
act. A kill at any moment leaves the old content, the new content, or a draft that `clear_drafts` removes.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpl.core.errors import DataError

__all__ = [
    "clear_drafts", "file_sha256", "lock", "naming", "open_lock", "read_json", "remove_folder", "replacing",
    "sync", "write_file", "write_folder",
]  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_file(path: Path, data: bytes | str) -> Path:
    """Write a file, replacing an older one only once the new one is on the disk."""
    with replacing(path) as draft:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft to write to; it takes the place of `path` if the block ends well, and is removed if not."""
    draft = _draft(path)
    try:
        with naming(path):
            yield draft
            sync(draft)
            os.replace(draft, path)
            sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write a folder of files; an older folder stays readable, at the latest as `.NAME.previous`, until this one is."""
    draft, previous = _draft(folder), folder.with_name(f".{folder.name}.previous")
    try:
        with naming(folder):
            draft.mkdir()
            for name, data in files.items():
                (draft / name).write_bytes(data)
                sync(draft / name)
            sync(draft)
            if folder.exists():
                shutil.rmtree(previous, ignore_errors=True)
                folder.rename(previous)
            draft.rename(folder)
            sync(folder.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def remove_folder(folder: Path) -> None:
    """Delete a folder; a crash on the way leaves a draft, never half of the folder."""
    doomed = folder.rename(_draft(folder))  # needs no room, so that a folder can be deleted from a full disk
    shutil.rmtree(doomed, ignore_errors=True)


def _draft(place: Path) -> Path:
    """Return a new name beside a place, in a folder that exists."""
    place.parent.mkdir(parents=True, exist_ok=True)
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")


def clear_drafts(folder: Path, name: str = "*") -> None:
    """Remove the drafts that killed writers of `name` left in a folder; the caller holds its lock."""
    for draft in folder.glob(f".{name}.*.tmp"):
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, to the disk; Windows cannot do the latter."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """Return the checksum of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a file") from error


@contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which is made if absent; yield False if another process has it and `wait` is off."""
    handle = open_lock(path, wait=wait)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def open_lock(path: Path, *, wait: bool = False) -> int | None:
    """Return an open, locked file (a folder must exist), or None if another process holds it.

    The lock is the system's, so it ends with its process, however that ends. The file may be removed by its holder
    between our opening and locking it; then the lock is on a nameless file and does not count.
    """
    while True:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR, 0o666)
        if not _lock(handle, wait):
            os.close(handle)
            return None
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)


def _lock(handle: int, wait: bool) -> bool:
    """Return False if another process holds the lock; a file system without locks is an error."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in the system's errors, and the disk if that is full; both are otherwise missing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        if error.errno == errno.ENOSPC and error.strerror == os.strerror(errno.ENOSPC):  # not named further inside
            disk = next(folder for folder in path.absolute().parents if folder.is_mount())
            error.strerror = f"{os.strerror(errno.ENOSPC)} on the disk at {disk}"
        raise
