"""Corrupted folders and array files: layout, resuming, broken input, and that the readers accept them."""

import json
import zlib

import numpy as np
import pytest
from PIL import Image

from dpl.core.errors import DataError, InputError, SettingError
from dpl.data import DataWarning, open_benchmark, resize_crop
from dpl.data.corruptions import CORRUPTIONS, corrupt, corrupt_arrays, corrupt_folder

KINDS = {"names": ["fog", "gaussian_noise"], "severities": [1, 5]}


def save(path, side, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((side, side)).save(path)


@pytest.fixture
def source(tmp_path):
    save(tmp_path / "clean/cat/a.png", 32)
    save(tmp_path / "clean/cat/b.jpg", 32, 1)
    save(tmp_path / "clean/dog/big/c.JPEG", 100, 2)
    save(tmp_path / "clean/dog/d.bmp", 100, 3)
    return tmp_path / "clean"


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_layout_formats_and_report(source, tmp_path):
    steps = []
    report = corrupt_folder(source, tmp_path / "c", progress=lambda done, total: steps.append((done, total)), **KINDS)
    assert (report.written, report.present, report.unusable) == (16, 0, {})
    assert steps == [(n, 4) for n in (1, 2, 3, 4)]
    files = {"cat/a.png", "cat/b.png", "dog/big/c.JPEG", "dog/d.jpg"}
    expected = {f"{name}/{s}/{file}" for name in KINDS["names"] for s in (1, 5) for file in files}
    assert set(contents(tmp_path / "c")) == expected | {"corruptions.json"}
    for file, kind, size in (("cat/b.png", "PNG", 32), ("dog/d.jpg", "JPEG", 100)):
        with Image.open(tmp_path / "c/fog/5" / file) as image:
            assert (image.format, image.size, image.mode) == (kind, (size, size), "RGB")


def test_small_images_are_written_without_loss(source, tmp_path):
    corrupt_folder(source, tmp_path / "c", **KINDS)
    clean = np.asarray(Image.open(source / "cat/a.png"))[None]
    expected = corrupt(clean, "gaussian_noise", 5, start=zlib.crc32(b"cat/a.png"))[0]
    assert (np.asarray(Image.open(tmp_path / "c/gaussian_noise/5/cat/a.png")) == expected).all()


def test_threads_and_other_files_change_nothing(source, tmp_path):
    corrupt_folder(source, tmp_path / "one", **KINDS)
    save(source / "ant/first.png", 32, 9)
    corrupt_folder(source, tmp_path / "three", workers=3, **KINDS)
    one, three = contents(tmp_path / "one"), contents(tmp_path / "three")
    assert one.items() <= three.items()
    assert len(three) == len(one) + 4


def test_an_interrupted_run_goes_on_where_it_stopped(source, tmp_path):
    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    for workers in (1, 2):
        target = tmp_path / f"c{workers}"
        with pytest.raises(KeyboardInterrupt):
            corrupt_folder(source, target, workers=workers, progress=stop, **KINDS)
        half = contents(target)
        assert not [name for name in half if name.endswith(".tmp")]
        report = corrupt_folder(source, target, **KINDS)
        assert report.present == len(half) - 1 >= 8
        assert report.written + report.present == 16
    assert contents(tmp_path / "c1") == contents(tmp_path / "c2")


def test_existing_files_are_not_made_again(source, tmp_path):
    corrupt_folder(source, tmp_path / "c", **KINDS)
    mark = tmp_path / "c/fog/1/cat/a.png"
    mark.write_bytes(b"kept")
    (tmp_path / "c/fog/5/cat/a.png").unlink()
    report = corrupt_folder(source, tmp_path / "c", **KINDS)
    assert (report.written, report.present) == (1, 15)
    assert mark.read_bytes() == b"kept"
    more = corrupt_folder(source, tmp_path / "c", names=["snow"], severities=[2])
    assert more.written == 4


def test_unreadable_files_are_named_and_left_out(source, tmp_path):
    (source / "cat/broken.jpg").write_bytes(b"<html>not found</html>")
    whole = (source / "dog/big/c.JPEG").read_bytes()
    (source / "dog/cut.jpg").write_bytes(whole[: len(whole) // 2])
    save(source / "dog/tiny.png", 5)
    report = corrupt_folder(source, tmp_path / "c", workers=2, **KINDS)
    assert set(report.unusable) == {"cat/broken.jpg", "dog/cut.jpg", "dog/tiny.png"}
    assert "8 pixels" in report.unusable["dog/tiny.png"]
    assert report.written == 16


def test_names_that_differ_in_the_extension_alone_do_not_collide(tmp_path):
    save(tmp_path / "clean/a.png", 32, 0)
    save(tmp_path / "clean/a.bmp", 32, 1)
    save(tmp_path / "clean/a.jpg", 32, 2)
    report = corrupt_folder(tmp_path / "clean", tmp_path / "c", names=["contrast"], severities=[1])
    assert report.written == 3
    assert {p.name for p in (tmp_path / "c/contrast/1").iterdir()} == {"a.png", "a.bmp.png", "a.jpg.png"}


def test_a_transform_comes_first(source, tmp_path):
    corrupt_folder(source, tmp_path / "c", transform=resize_crop(80, 72), names=["fog"], severities=[3])
    sizes = {Image.open(path).size for path in (tmp_path / "c/fog/3").rglob("*.*")}
    assert sizes == {(72, 72)}


def test_another_seed_does_not_mix_with_the_first(source, tmp_path):
    corrupt_folder(source, tmp_path / "c", seed=1, **KINDS)
    with pytest.raises(SettingError, match="seed=1, now seed=2"):
        corrupt_folder(source, tmp_path / "c", seed=2, **KINDS)
    (tmp_path / "c/corruptions.json").write_text("{")
    with pytest.raises(DataError, match=r"corruptions\.json"):
        corrupt_folder(source, tmp_path / "c", seed=1, **KINDS)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"names": ["frots"]}, SettingError, "'frost'"),
        ({"severities": [7]}, SettingError, "severity=7"),
        ({"workers": 0}, SettingError, "workers=0"),
        ({"target": "clean/c"}, SettingError, "inside"),
        ({"source": "nowhere"}, DataError, "nowhere"),
        ({"source": "empty"}, DataError, "no image"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_written(source, tmp_path, change, error, says):
    (tmp_path / "empty").mkdir()
    paths = {key: tmp_path / change.pop(key, default) for key, default in (("source", "clean"), ("target", "c"))}
    with pytest.raises(error, match=says):
        corrupt_folder(**paths, **change)
    assert not paths["target"].exists()


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8), np.array([3, 1, 4, 1, 5, 9])


def test_array_files_have_the_layout_of_cifar_c(arrays, tmp_path):
    images, labels = arrays
    steps = []
    paths = corrupt_arrays(images, labels, tmp_path, progress=lambda *step: steps.append(step))
    assert [p.name for p in paths] == ["labels.npy", *(f"{name}.npy" for name in CORRUPTIONS)]
    assert steps == [(n, 15) for n in range(1, 16)]
    assert np.load(paths[0]).dtype == np.uint8
    assert np.load(paths[0]).tolist() == labels.tolist() * 5
    stack = np.load(tmp_path / "snow.npy")
    assert stack.shape == (30, 32, 32, 3)
    for severity in (1, 5):
        rows = slice(6 * (severity - 1), 6 * severity)
        assert (stack[rows] == corrupt(images, "snow", severity)).all()
    with pytest.warns(DataWarning):  # six images are not ten thousand
        opened = open_benchmark("cifar10-c", tmp_path, severity=5)
    assert list(opened.domains) == list(CORRUPTIONS)


def test_array_files_are_resumed_and_not_mixed(arrays, tmp_path):
    images, labels = arrays
    corrupt_arrays(images, labels, tmp_path, names=["fog", "contrast"])
    (tmp_path / "fog.npy").write_bytes(b"kept")
    (tmp_path / "contrast.npy").unlink()
    corrupt_arrays(images, labels, tmp_path, names=["fog", "contrast"])
    assert (tmp_path / "fog.npy").read_bytes() == b"kept"
    assert (tmp_path / "contrast.npy").exists()
    with pytest.raises(SettingError, match="images_crc32"):
        corrupt_arrays(images[:5], labels[:5], tmp_path, names=["fog"])
    assert json.loads((tmp_path / "corruptions.json").read_text())["seed"] == 0


def test_a_failed_array_leaves_no_file(arrays, tmp_path, monkeypatch):
    images, labels = arrays

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpl.data.corruptions.stacks.corrupt", fail)
    with pytest.raises(OSError, match="No space"):
        corrupt_arrays(images, labels, tmp_path, names=["fog"])
    assert {p.name for p in tmp_path.iterdir()} == {"labels.npy", "corruptions.json"}


@pytest.mark.parametrize("labels", [[1, 2], [0.5] * 6, [-1] * 6, [[1] * 6]])
def test_wrong_labels_are_refused(arrays, tmp_path, labels):
    with pytest.raises(InputError, match="labels"):
        corrupt_arrays(arrays[0], np.array(labels), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_many_classes_take_wider_labels(arrays, tmp_path):
    corrupt_arrays(arrays[0], np.arange(994, 1000), tmp_path, names=["contrast"])
    assert np.load(tmp_path / "labels.npy").max() == 999
