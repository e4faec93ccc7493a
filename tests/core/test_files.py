"""Files and folders are replaced whole or not at all, and a lock ends with the process that holds it."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpl.core.errors import DataError
from dpl.core.files import (
    clear_drafts,
    file_sha256,
    lock,
    open_lock,
    remove_folder,
    replacing,
    write_file,
    write_folder,
)

HOLD = """
import sys, pathlib
from dpl.core.files import open_lock
handle = open_lock(pathlib.Path(sys.argv[1]))
print(handle is not None, flush=True)
sys.stdin.read()
"""
DIE_WHILE_WRITING = """
import os, sys, pathlib
from dpl.core.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as draft:
    draft.write_text("half of the new")
    os._exit(9)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", [b"new", "new"])
def test_a_file_is_replaced_and_its_folder_is_made(tmp_path: Path, data: bytes | str) -> None:
    path = tmp_path / "made" / "result.json"
    assert write_file(path, b"old") == path
    assert write_file(path, data) == path
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["result.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such file modes")
def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    assert write_file(tmp_path / "replaced", "").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_keeps_its_old_content_until_the_block_ends(tmp_path: Path) -> None:
    path = write_file(tmp_path / "result.json", "old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("stop", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_the_old_file_and_no_draft(tmp_path: Path, stop: type[BaseException]) -> None:
    path = write_file(tmp_path / "result.json", "old")

    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("half of the new")
            raise stop

    with pytest.raises(stop):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["result.json"]


def test_a_writer_killed_while_writing_leaves_the_old_file_and_a_draft(tmp_path: Path) -> None:
    path = write_file(tmp_path / "result.json", "old")
    assert subprocess.run([sys.executable, "-c", DIE_WHILE_WRITING, path], check=False).returncode == 9
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    clear_drafts(tmp_path)
    assert names(tmp_path) == ["result.json"]


def test_an_error_of_the_system_names_the_file(tmp_path: Path) -> None:
    """The system reports a full disk without a name."""
    path = tmp_path / "result.json"
    with pytest.raises(OSError, match="No space left") as caught, replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(path)


def test_a_name_in_an_error_of_the_system_is_kept(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "result.json"):
        missing.read_bytes()
    assert caught.value.filename == str(missing)


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made" / "run", {"first": b"1", "second": b"2"})
    assert write_folder(folder, {"third": b"3"}) == folder
    assert names(folder) == ["third"]
    assert (folder / "third").read_bytes() == b"3"
    assert names(folder.parent) == ["run"]


class Watched(dict[str, bytes]):
    """Files to write that note what the folder holds when each is asked for."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.folder, self.seen = folder, list[list[str]]()

    def items(self) -> Iterator[tuple[str, bytes]]:  # type: ignore[override]
        for item in super().items():
            self.seen.append(names(self.folder))
            yield item


def test_the_previous_folder_stays_while_the_new_files_are_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {"old": b""})
    files = Watched(folder, {"new": b"", "newer": b""})
    write_folder(folder, files)
    assert files.seen == [["old"], ["old"]]
    assert names(folder) == ["new", "newer"]


def test_a_file_that_cannot_be_written_leaves_the_previous_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {"old": b"kept"})
    with pytest.raises(FileNotFoundError):
        write_folder(folder, {"new": b"", "no such folder/new": b""})
    assert (folder / "old").read_bytes() == b"kept"
    assert names(tmp_path) == ["run"]


def test_between_the_two_renames_the_previous_folder_has_its_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "run", {"old": b"kept"})
    rename = Path.rename

    def fail_for_drafts(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_drafts)
    with pytest.raises(OSError, match="Input/output") as caught:
        write_folder(folder, {"new": b""})
    assert caught.value.filename == str(folder)
    assert names(tmp_path) == [".run.previous"]
    assert (tmp_path / ".run.previous" / "old").read_bytes() == b"kept"


def test_a_removed_folder_leaves_nothing(tmp_path: Path) -> None:
    remove_folder(write_folder(tmp_path / "run", {"file": b""}))
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_deleted_loses_its_name_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "run", {"file": b"", "other": b""})
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    remove_folder(folder)
    (draft,) = tmp_path.iterdir()
    assert names(draft) == ["file", "other"]
    monkeypatch.undo()
    clear_drafts(tmp_path, "run")
    assert names(tmp_path) == []


def test_only_drafts_are_cleared(tmp_path: Path) -> None:
    for name in ("run", "run.tmp", ".run.a1.tmp", ".other.a1.tmp", ".run.previous"):
        write_folder(tmp_path / name, {"file": b""})
    write_file(tmp_path / ".run.b2.tmp", b"")
    clear_drafts(tmp_path, "run")
    assert names(tmp_path) == [".other.a1.tmp", ".run.previous", "run", "run.tmp"]
    clear_drafts(tmp_path)
    assert names(tmp_path) == [".run.previous", "run", "run.tmp"]


def test_the_checksum_is_sha256(tmp_path: Path) -> None:
    path = write_file(tmp_path / "weights", b"bytes")
    assert file_sha256(path) == hashlib.sha256(b"bytes").hexdigest()
    with pytest.raises(DataError, match="missing: cannot be read"):
        file_sha256(tmp_path / "missing")


@contextmanager
def held_by_another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lock of a file, and kill the process at the end."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_held_by_another_process_is_not_given_until_that_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with held_by_another_process(path) as process:
        assert open_lock(path) is None
        with lock(path, wait=False) as held:
            assert not held
        process.kill()
        process.wait()
        handle = open_lock(path)
    assert handle is not None
    os.close(handle)


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with lock(path) as held:
        assert held
        assert open_lock(path) is None
    with pytest.raises(KeyboardInterrupt), lock(path):
        raise KeyboardInterrupt
    with lock(path, wait=False) as held:
        assert held


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_a_folder_can_be_locked(tmp_path: Path) -> None:
    with lock(tmp_path):
        assert open_lock(tmp_path) is None
    assert names(tmp_path) == []


def test_a_lock_file_that_its_holder_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is removed after it was opened and before it is locked, once."""
    path, opened, system_open = tmp_path / ".lock", [], os.open

    def open_and_lose_the_first(*arguments: object) -> int:
        handle = system_open(*arguments)  # type: ignore[arg-type]
        opened.append(handle)
        if len(opened) == 1:
            path.unlink()
        return handle

    monkeypatch.setattr(os, "open", open_and_lose_the_first)
    handle = open_lock(path)
    assert handle is not None
    assert len(opened) == 2
    assert os.path.samestat(os.fstat(handle), path.stat())
    os.close(handle)
