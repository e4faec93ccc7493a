import hashlib
import json
from pathlib import Path

import pytest
import torch

import dpl
from dpl.core.errors import SnapshotCorrupt, SnapshotError
from dpl.snapshot import read_manifest, read_snapshot, write_snapshot

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}
MANIFEST = {"method": "tent", "settings": {"lr": 1e-05}, "notes": {}}


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "one", MANIFEST, TENSORS)
    manifest, tensors = read_snapshot(folder)
    assert manifest["settings"] == {"lr": 1e-05}
    assert (manifest["format"], manifest["dpl"]) == (2, dpl.__version__)
    assert read_manifest(folder) == manifest
    assert all(torch.equal(tensors[key], value) for key, value in TENSORS.items())


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "one", MANIFEST, TENSORS)
    path = folder / "manifest.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        with pytest.raises(SnapshotCorrupt, match=r"manifest\.json"):
            read_manifest(folder)


def test_a_change_that_means_the_same_is_noticed(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "one", MANIFEST, TENSORS)
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"1e-05", b"1E-05"))
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        read_snapshot(folder)


def test_another_format_is_refused_and_the_version_that_reads_it_is_named(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "one", MANIFEST | {"format": 99, "dpl": "7.0"}, TENSORS)
    with pytest.raises(SnapshotError, match=r"format 99, .* reads 2; dpl 7\.0 wrote it and can read it"):
        read_snapshot(folder)


def test_a_snapshot_of_format_1_is_refused_and_dpl_0_1_is_named(tmp_path: Path) -> None:
    """Format 1 as it was: no key for the writer's version."""
    folder = write_snapshot(tmp_path / "one", MANIFEST, TENSORS)
    record = json.loads((folder / "manifest.json").read_text()) | {"format": 1}
    del record["dpl"], record["manifest_sha256"]
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(record | {"manifest_sha256": digest}, indent=2))
    with pytest.raises(SnapshotError, match=r"format 1, .* reads 2; dpl 0\.1 wrote it and can read it"):
        read_manifest(folder)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(SnapshotError, match="not a snapshot"):
        write_snapshot(tmp_path / "mine", MANIFEST, TENSORS)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_a_snapshot_is_replaced_whole(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "one", MANIFEST, TENSORS)
    write_snapshot(folder, MANIFEST | {"notes": {"second": True}}, TENSORS)
    assert read_manifest(folder)["notes"] == {"second": True}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_snapshot_before_is_found_after_a_crash_between_two_renames(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "one", MANIFEST, TENSORS)
    folder.rename(tmp_path / ".one.previous")
    assert read_snapshot(folder)[0]["method"] == "tent"


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", json.dumps({"files": {}}), "\x80\x04N."])
def test_nonsense_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(SnapshotCorrupt, match="JSON manifest"):
        read_manifest(tmp_path)
