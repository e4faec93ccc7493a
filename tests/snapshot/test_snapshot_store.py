import threading
from pathlib import Path

import pytest
import torch

import dpl
from dpl.core.errors import SettingError, SnapshotCorrupt, SnapshotError
from dpl.core.files import lock
from dpl.snapshot import SnapshotStore, read_manifest
from nets import images, network


def adaptive(steps: int = 2) -> dpl.AdaptiveModel:
    model = dpl.adapt(network(), "tent")
    for i in range(steps):
        model(images(8, seed=i))
    return model


def damage(path: Path, file: str = "state.safetensors") -> None:
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(bytes(data))


def test_numbers_rise_and_only_the_last_are_kept(tmp_path: Path) -> None:
    store, model = SnapshotStore(tmp_path / "deep" / "store", keep=2), adaptive()
    saved = [store.save(model, {"batch": i}) for i in range(5)]
    assert [path.name for path in saved] == [f"{n:08d}" for n in range(1, 6)]
    assert store.all() == saved[-2:]
    assert store.newest() == saved[-1]
    assert read_manifest(saved[-1])["notes"] == {"batch": 4}
    again = SnapshotStore(store.folder, keep=2)
    assert again.save(model).name == "00000006"


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "none")
    assert store.newest() is None
    assert not store.folder.exists()
    with pytest.raises(SnapshotError, match="no snapshot yet"):
        dpl.load(store, network())


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_a_damaged_snapshot_is_refused_by_name_and_the_one_before_taken(tmp_path: Path, file: str) -> None:
    store, model = SnapshotStore(tmp_path), adaptive()
    good = store.save(model)
    expected = model.state_dict()
    model(images(8, seed=9))
    bad = store.save(model)
    damage(bad, file)
    with pytest.warns(RuntimeWarning, match=str(bad / file)):
        assert store.newest() == good
    with pytest.warns(RuntimeWarning, match=bad.name):
        loaded = dpl.load(store, network()).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_a_store_of_damaged_snapshots_names_them_all(tmp_path: Path) -> None:
    store, model = SnapshotStore(tmp_path), adaptive()
    paths = [store.save(model), store.save(model)]
    for path in paths:
        damage(path)
    with pytest.warns(RuntimeWarning), pytest.raises(SnapshotCorrupt) as error:
        store.newest()
    assert all(str(path) in str(error.value) for path in paths)


def test_drafts_of_killed_writers_are_removed(tmp_path: Path) -> None:
    store, model = SnapshotStore(tmp_path), adaptive()
    store.save(model)
    left = [tmp_path / ".00000002.a1b2.tmp", tmp_path / ".00000001.old.tmp"]
    for folder in left:
        folder.mkdir()
        (folder / "state.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    SnapshotStore(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "00000001", "notes.txt", "other"]


def test_no_draft_is_removed_while_somebody_writes(tmp_path: Path) -> None:
    writing = tmp_path / ".00000001.a1b2.tmp"
    writing.mkdir()
    with lock(tmp_path / ".lock"):
        SnapshotStore(tmp_path)
        assert writing.exists()
    SnapshotStore(tmp_path)
    assert not writing.exists()


def test_writers_at_the_same_time_take_turns(tmp_path: Path) -> None:
    models = [adaptive() for _ in range(4)]
    threads = [threading.Thread(target=SnapshotStore(tmp_path, keep=8).save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in SnapshotStore(tmp_path).all()] == [f"{n:08d}" for n in range(1, 5)]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="keep must be a whole number of at least 1, got 0"):
        SnapshotStore(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="is a file"):
        SnapshotStore(tmp_path / "file")


def test_a_guarded_model_comes_back_with_its_guard(tmp_path: Path) -> None:
    model = dpl.adapt(network(), "tent", guard={"limit": 2})
    for i in range(20):
        model(images(8, seed=i))
    store = SnapshotStore(tmp_path)
    store.save(model)
    loaded = dpl.load(store, network())
    assert loaded.guard is not None
    assert loaded.guard.settings == model.guard.settings
    for i in range(20, 40):
        assert torch.equal(loaded(images(8, seed=i)), model(images(8, seed=i)))
    assert loaded.guard.counts == model.guard.counts
