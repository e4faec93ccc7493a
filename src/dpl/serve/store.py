"""Streams on disk: one folder per stream, with its snapshots.

    STATE/model.json                                 the model, method and settings that the streams belong to
    STATE/streams/<stream>/<seq>-<version>-<kind>/   one snapshot

`seq` counts the jobs of a stream. `version` is the `seq` at which the saved state was reached: a rollback saves an old
version under a new `seq`. One server at a time may use a folder; its lock ends with its process. One thread writes to
it, and no other waits for that. A failed write is reported, and retried until it succeeds.
"""

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from torch import Tensor

import dpl
from dpl.core.errors import InputError, SettingError, SnapshotError
from dpl.core.files import clear_drafts, open_lock, remove_folder, sync, write_file
from dpl.snapshot import read_manifest, read_snapshot, write_snapshot

if TYPE_CHECKING:
    from dpl.serve.monitoring import Metrics
    from dpl.serve.stream import Stream

__all__ = [
    "Difference", "StreamSnapshot", "StreamStore", "Writer", "check_replicas", "check_stream_id", "size_of",
]  # fmt: skip

Difference = Mapping[str, Tensor | None]  # what differs from the source state; None for a tensor that is missing
_STREAM_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_NAME = re.compile(r"(\d{12})-(\d{12})-(auto|manual)")
_RETRY_SECONDS = 2.0
_log = logging.getLogger("dpl.serve")


def check_stream_id(stream_id: str) -> str:
    """Return a valid stream name, which becomes the name of a folder, or raise."""
    if not _STREAM_ID.fullmatch(stream_id):
        raise InputError(
            f"stream {stream_id[:100]!r}: expected 1 to 100 letters, digits, '.', '_' or '-', "
            "the first and last a letter or digit"
        )
    return stream_id


def check_replicas(state: Path, count: int) -> None:
    """Refuse a folder that another number of replicas has written (0: a server without Ray): streams move with it."""
    for path in state.glob("*"):
        if (count and path.name == "streams") or re.fullmatch(rf"replica-\d+-of-(?!{count}$)\d+", path.name):
            raise SettingError(
                f"--state {state}: {path.name} was written without --engine ray, or with other --replicas; start the "
                "server as before, or choose another folder"
            )


def size_of(difference: Difference | None) -> int:
    """Return the bytes of all tensors."""
    return sum(value.nbytes for value in (difference or {}).values() if value is not None)


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream's state as it is stored, or only what the name of its folder says: the first three fields."""

    seq: int
    version: int
    kind: str
    difference: Difference = field(default_factory=dict)
    adapted: int = 0  # batches
    images: int = 0
    steps: int = 0  # of this process, when the snapshot was taken

    def __str__(self) -> str:
        return f"{self.seq:012d}-{self.version:012d}-{self.kind}"

    def describe(self) -> dict[str, Any]:
        """Return what the name says, as it is shown in responses."""
        return {"seq": self.seq, "version": self.version, "kind": self.kind}


class StreamStore:
    """The folder with all streams of one server."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], keep: int) -> None:
        self.folder, self._identity, self._keep = folder.resolve(), dict(identity), keep
        self._streams, self._mark = self.folder / "streams", self.folder / "model.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open_lock(self.folder)
        if self._lock is None:
            raise SettingError(f"{self.folder} is in use by another server; choose another --state folder")
        try:
            self._check_owner()
        except SettingError:
            self.close()
            raise
        self.problem = self._claim()  # why the folder cannot be written, if it cannot

    def _check_owner(self) -> None:
        """Refuse a folder of another model, or of several replicas."""
        check_replicas(self.folder, 0)
        try:
            known = json.loads(self._mark.read_text()) if self._mark.exists() else {}
            wanted = json.loads(json.dumps(self._identity))
            different = [key for key, value in wanted.items() if known.get(key, value) != value]
        except (ValueError, AttributeError, RecursionError, OSError) as error:
            raise SettingError(f"{self._mark}: damaged ({error}); choose another --state folder") from error
        if different:
            raise SettingError(
                f"{self.folder} holds streams of another model (different: {', '.join(different)}); "
                "choose another --state folder"
            )

    def _claim(self) -> str | None:
        """Clear what a killed server left, and record that the folder belongs to this model."""
        try:
            self._streams.mkdir(exist_ok=True)
            for folder in (self.folder, self._streams, *filter(Path.is_dir, self._streams.iterdir())):
                clear_drafts(folder)
            if not self._mark.exists():
                write_file(self._mark, json.dumps({**self._identity, "dpl": dpl.__version__}, indent=2))
        except OSError as error:
            return str(error.strerror or error)
        return None

    def stream_ids(self) -> list[str]:
        """Return the streams that have a snapshot; a folder that no stream has made is named and left alone."""
        found = []
        for path in self._streams.iterdir() if self._streams.is_dir() else ():
            stream_id = unquote(path.name)
            if path.name[0] == "." or not _snapshots(path):
                continue
            if _STREAM_ID.fullmatch(stream_id) and self._place(stream_id) == path:
                found.append(stream_id)
            else:
                _log.warning("%s is not the folder of a stream; it is not used", path)
        return sorted(found)

    def snapshots(self, stream_id: str) -> list[StreamSnapshot]:
        """Return a stream's snapshots, newest first, without reading them."""
        return _snapshots(self._place(stream_id))

    def write(self, stream_id: str, snapshot: StreamSnapshot) -> None:
        """Write a snapshot durably, then remove the oldest ones beyond the number to keep."""
        changed = {key: value for key, value in snapshot.difference.items() if value is not None}
        facts = {"stream": stream_id, "seq": snapshot.seq, "version": snapshot.version, "adapted": snapshot.adapted,
                 "images": snapshot.images, "removed": sorted(snapshot.difference.keys() - changed)}  # fmt: skip
        is_new = not self._place(stream_id).exists()
        write_snapshot(self._place(stream_id, snapshot), self._identity | facts, changed)
        if is_new:
            sync(self._streams)
        for old in [old for old in self.snapshots(stream_id) if old.kind == snapshot.kind][self._keep :]:
            remove_folder(self._place(stream_id, old))

    def _read(self, stream_id: str, name: StreamSnapshot) -> StreamSnapshot:
        folder = self._place(stream_id, name)
        manifest, tensors = read_snapshot(folder)
        if [manifest.get(key) for key in ("stream", "seq", "version")] != [stream_id, name.seq, name.version]:
            raise SnapshotError(f"{folder} is the snapshot of another stream or moment")
        if not all(isinstance(key, str) for key in manifest["removed"]):
            raise SnapshotError(f"{folder}: expected names of tensors in removed, found {manifest['removed']!r:.80}")
        difference = tensors | dict.fromkeys(manifest["removed"])
        return StreamSnapshot(name.seq, name.version, name.kind, difference, *_counts(manifest))

    def counts(self, stream_id: str) -> tuple[int, int]:
        """Return the numbers of adapted batches and images of the newest snapshot, without reading its tensors."""
        for name in self.snapshots(stream_id):
            with suppress(Exception):  # the next one may be good
                return _counts(read_manifest(self._place(stream_id, name)))
        return 0, 0

    def newest(
        self,
        stream_id: str,
        names: Iterable[StreamSnapshot] | None = None,
        use: Callable[[StreamSnapshot], None] = lambda _: None,
    ) -> tuple[StreamSnapshot | None, list[str]]:
        """Return the newest valid snapshot (of those that are given), and what was wrong with newer ones.

        `use` is called with it; if that fails, an older one is tried.
        """
        problems: list[str] = []
        for name in self.snapshots(stream_id) if names is None else names:
            try:
                snapshot = self._read(stream_id, name)
                use(snapshot)
                return snapshot, problems
            except Exception as error:  # whatever is wrong with one snapshot, an older one may be good
                problems.append(f"{self._place(stream_id, name)}: {error}")
        return None, problems

    def size(self, stream_id: str) -> int:
        """Return the bytes of a stream's snapshots."""
        files = (file for name in self.snapshots(stream_id) for file in self._place(stream_id, name).iterdir())
        return sum(file.stat().st_size for file in files)

    def delete(self, stream_id: str) -> None:
        """Remove a stream with all its snapshots."""
        if self._place(stream_id).exists():
            remove_folder(self._place(stream_id))

    def close(self) -> None:
        """Release the lock, so that another server can use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _place(self, stream_id: str, *snapshot: StreamSnapshot) -> Path:
        """Return the folder of a stream or of its snapshot; some file systems ignore case, so capitals are escaped."""
        name = "".join(f"%{ord(c):02x}" if c.isupper() else c for c in stream_id)
        return self._streams.joinpath(name, *map(str, snapshot))


def _counts(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of adapted batches and images; a forged manifest with a valid checksum may lack them."""
    adapted, images = manifest["adapted"], manifest["images"]
    if not all(isinstance(count, int) and count >= 0 for count in (adapted, images)):
        raise SnapshotError(f"expected counts of batches and images, found {adapted!r:.40} and {images!r:.40}")
    return adapted, images


def _snapshots(folder: Path) -> list[StreamSnapshot]:
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((StreamSnapshot(int(it[1]), int(it[2]), it[3]) for it in matches if it), key=str, reverse=True)


@dataclass
class _Task:
    stream: "Stream"
    snapshot: StreamSnapshot | None  # None: delete the stream
    done: "Future[None]" = field(default_factory=Future)

    @property
    def key(self) -> tuple[str, str]:
        return self.stream.id, self.snapshot.kind if self.snapshot else "delete"


class Writer:
    """Writes snapshots in the order of the calls; of several automatic ones that wait, only the newest."""

    def __init__(self, store: StreamStore, metrics: "Metrics", slow: float) -> None:
        self._store, self._metrics, self._slow = store, metrics, slow
        self._tasks: dict[tuple[str, str], _Task] = {}  # by stream and kind, in the order of the calls
        self._failed: dict[str, _Task] = {}  # by stream: the last one, unless a later one succeeded
        self._changed = threading.Condition()
        self._began = math.inf  # when the present write began
        self._stopping = False
        self._failure: str | None = store.problem
        self._thread = threading.Thread(target=self._work, name="dpl-serve-writer", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why the folder cannot be written at present, or that it is slow."""
        seconds = time.monotonic() - self._began
        if self._failure is None and seconds > self._slow:
            return f"the disk is slow: a write has taken {seconds:.0f} s"
        return self._failure

    def save(self, stream: "Stream", snapshot: StreamSnapshot) -> "Future[None]":
        """Write a snapshot in the background; the result is there when it is on the disk, or an OSError."""
        with self._changed:
            task = _Task(stream, snapshot)
            waiting = self._tasks.get(task.key)
            if waiting is None:
                return self._put(task)
            if snapshot.kind != "auto":
                raise OSError("an earlier snapshot of the stream still waits to be written")
            waiting.snapshot = snapshot
            return waiting.done

    def delete(self, stream: "Stream") -> "Future[None]":
        """Delete a stream's folder in the background, and drop the automatic snapshots of it that still wait."""
        with self._changed:
            self._failed.pop(stream.id, None)
            self._tasks.pop((stream.id, "auto"), None)
            return self._put(_Task(stream, None))

    def stop(self, seconds: float) -> bool:
        """Write the snapshots that wait, then end the thread; return whether that took less than `seconds`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _put(self, task: _Task) -> "Future[None]":
        if self._stopping:
            raise OSError("the server is stopping")
        self._tasks[task.key] = task
        self._changed.notify()
        return task.done

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                if task.snapshot is None:
                    self._store.delete(task.stream.id)
                else:
                    self._store.write(task.stream.id, task.snapshot)
                    task.stream.disk = self._store.size(task.stream.id)
                    task.stream.note_snapshot(task.snapshot)
            except Exception as error:  # no error may stop the writing of other streams
                self._note_failure(task, error)
            else:
                if self._failure is not None:
                    _log.warning("the state folder can be written again")
                self._failure = None
                with self._changed:
                    self._failed.pop(task.stream.id, None)
                self._metrics.snapshots.labels("written").inc()
                task.done.set_result(None)

    def _next(self) -> _Task | None:
        """Return the next task, or a failed one to retry if no other comes for a while; None at the end."""
        with self._changed:
            self._began = math.inf
            while not self._tasks:
                if self._stopping:
                    return None
                if not self._changed.wait(_RETRY_SECONDS if self._failed else None) and self._failed:
                    retried = self._failed.pop(next(iter(self._failed)))
                    self._tasks[retried.key] = retried
            self._began = time.monotonic()
            return self._tasks.pop(next(iter(self._tasks)))

    def _note_failure(self, task: _Task, error: Exception) -> None:
        if not isinstance(error, OSError):
            _log.error("unexpected error of a write", exc_info=error, extra={"stream": task.stream.id})
            error = OSError(f"{type(error).__name__}: {error}")
        reason = str(error.strerror or error)
        if self._failure is None:
            _log.error("%s cannot be written: %s", self._store.folder, reason, extra={"stream": task.stream.id})
            task.stream.event("snapshot_failed", reason=reason)
        self._failure = reason
        if task.snapshot is not None:
            with self._changed:
                self._failed[task.stream.id] = _Task(task.stream, task.snapshot)
        self._metrics.snapshots.labels("failed").inc()
        task.done.set_exception(error)
