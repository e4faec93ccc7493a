"""The cache of decoded images: used if sound, made again if damaged, never trusted half-written."""

import json
import os
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from data.make import make_folder, shape_arrays
from dpl.core.errors import DataError, SettingError
from dpl.data import DataWarning, ImageSet, batches, open_folder, square, training, unchanged
from dpl.data import sets as sets_module


@pytest.fixture
def files(tmp_path):
    return open_folder(make_folder(tmp_path, classes=("a", "b"), per_class=6))


@pytest.fixture
def decoded(monkeypatch):
    """Count how many files are decoded."""
    calls = []
    real = sets_module.decode
    monkeypatch.setattr(sets_module, "decode", lambda path, **options: calls.append(path) or real(path, **options))
    return calls


def read(image_set, cache, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(batches(image_set, [7, 1, 11, 2, 3], square(16), 2, cache=cache, **options))


def pixels(found):
    return torch.cat([batch.images for batch in found])


def test_the_second_time_nothing_is_decoded(files, tmp_path, decoded):
    plain = list(batches(files, [7, 1, 11, 2, 3], square(16), 2))
    assert len(decoded) == 5
    first = read(files, tmp_path / "cache", workers=2)
    assert len(decoded) == 5 + 12
    second = read(files, tmp_path / "cache")
    assert len(decoded) == 5 + 12
    for found in (first, second):
        assert torch.equal(pixels(found), pixels(plain))
        assert [b.indices.tolist() for b in found] == [b.indices.tolist() for b in plain]
        assert [b.labels.tolist() for b in found] == [b.labels.tolist() for b in plain]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".npy"]


def test_another_transform_or_a_changed_file_is_another_entry(files, tmp_path):
    cache = tmp_path / "cache"
    read(files, cache)
    list(batches(files, None, square(20), 4, cache=cache))
    assert len(list(cache.glob("*.npy"))) == 2
    Image.new("RGB", (30, 30), (255, 0, 0)).save(files.location(1))
    found = read(files, cache)
    assert len(list(cache.glob("*.npy"))) == 3
    assert found[0].images[1, 0].min() > 0.98


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lose_the_mark(path):
    path.with_suffix(".json").unlink()


def garble_the_mark(path):
    path.with_suffix(".json").write_text("{")


def wrong_mark(path):
    path.with_suffix(".json").write_text("[1, 2]")


def claim_a_failure(path):
    noted = json.loads(path.with_suffix(".json").read_text())
    noted["failed"] = {"7": "not so"}
    path.with_suffix(".json").write_text(json.dumps(noted))


@pytest.mark.parametrize("damage", [flip_a_bit, cut, lose_the_mark, garble_the_mark, wrong_mark, claim_a_failure])
def test_a_damaged_entry_is_made_again(files, tmp_path, decoded, damage):
    cache = tmp_path / "cache"
    good = read(files, cache)
    (path,) = cache.glob("*.npy")
    damage(path)
    decoded.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = list(batches(files, [7, 1, 11, 2, 3], square(16), 2, cache=cache))
    assert len(decoded) == 12
    assert torch.equal(pixels(good), pixels(again))
    assert all(not batch.failed for batch in again)
    assert [str(w.message) for w in caught if w.category is DataWarning] == (
        [] if damage is lose_the_mark else [f"{path}: the cached images are damaged and are decoded again"]
    )
    decoded.clear()
    read(files, cache)
    assert not decoded


def test_unreadable_images_are_remembered(files, tmp_path, decoded):
    for index in (0, 1, 11):
        with open(files.location(index), "wb") as stream:
            stream.write(b"no image")
    plain = list(batches(files, [7, 1, 11, 2, 3], square(16), 2))
    for _ in range(2):
        found = read(files, tmp_path / "cache")
        assert [batch.failed for batch in found] == [batch.failed for batch in plain]
        assert torch.equal(pixels(found), pixels(plain))
        assert [b.indices.tolist() for b in found] == [[7], [2], [3]]
    assert len(decoded) == 5 + 12
    with pytest.raises(DataError, match=f"{files.location(1)}: not an image"):
        read(files, tmp_path / "cache", on_error="raise")


def test_a_set_without_a_readable_image(files, tmp_path):
    for index in range(12):
        with open(files.location(index), "wb") as stream:
            stream.write(b"no image")
    with pytest.raises(DataError, match="none of its 12 images can be read"):
        read(files, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_run_that_is_broken_off_leaves_nothing_that_counts(files, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    real, calls = sets_module.decode, []

    def interrupted(path, **options):
        calls.append(path)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(path, **options)

    monkeypatch.setattr(sets_module, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(files, cache)
    assert list(cache.iterdir()) == []
    monkeypatch.undo()
    assert len(read(files, cache)) == 3


def test_drafts_of_killed_processes_are_cleared_after_a_day(files, tmp_path):
    cache = tmp_path / "cache"
    read(files, cache)
    (path,) = cache.glob("*.npy")
    old, young = (path.with_name(f".{path.name}.{part}.tmp") for part in ("old", "young"))
    for draft in (old, young):
        draft.write_bytes(b"half")
    os.utime(old, (0, time.time() - 90_000))
    lose_the_mark(path)
    read(files, cache)
    assert not old.exists()
    assert young.exists()


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(files, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(DataWarning, match="continuing without a cache") as caught:
        found = list(batches(files, [7, 1], square(16), 2, cache=tmp_path / "file" / "cache"))
    assert len(caught) == 1
    assert len(found[0]) == 2


def test_a_full_disk_is_no_reason_to_stop(files, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(DataWarning, match=r"cannot be written \(No space left on device"):
        found = list(batches(files, [7, 1], square(16), 2, cache=tmp_path / "cache"))
    assert len(found[0]) == 2
    assert list((tmp_path / "cache").iterdir()) == []


def test_arrays_are_cached_only_where_there_is_something_to_save(tmp_path):
    values, labels = shape_arrays(9, 3)
    arrays = ImageSet.from_array("toy", values, labels, ("a", "b", "c")).subset([8, 0, 4])
    list(batches(arrays, None, unchanged(), 4, cache=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    (plain,) = batches(arrays, None, square(48), 4)
    (held,) = batches(arrays, None, square(48), 4, cache=tmp_path / "cache")
    assert torch.equal(plain.images, held.images)
    assert np.load(next((tmp_path / "cache").glob("*.npy"))).shape == (3, 48, 48, 3)


def test_files_of_different_sizes_are_refused(tmp_path):
    for name, size in (("a", (8, 8)), ("b", (9, 8))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    with pytest.raises(DataError, match=r"b\.png: 9 x 8 pixels"):
        batches(open_folder(tmp_path), None, unchanged(), 2, cache=tmp_path / "cache")


def test_only_known_transforms_are_cached(files, tmp_path):
    class Own:
        def pixels(self, image, generator=None):
            return np.asarray(image.resize((8, 8)))

    assert len(list(batches(files, None, Own(), 12))) == 1
    with pytest.raises(SettingError, match=r"cache: .* cannot be cached"):
        batches(files, None, Own(), 4, cache=tmp_path / "cache")
    with pytest.raises(SettingError, match="belongs to training_batches"):
        batches(files, None, training(8), 4, cache=tmp_path / "cache")
