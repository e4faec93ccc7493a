"""CIFAR-10 and CIFAR-100, clean and corrupted, in each form in which they are met."""

import numpy as np
import pytest

from data.make import make_cifar, make_cifar_c, shape_arrays
from dpl.core.errors import DataError, SettingError
from dpl.data import DataWarning, open_benchmark
from dpl.data.facts import CIFAR10_CLASSES, CIFAR100_CLASSES, CORRUPTIONS

quiet = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def error_of(name, root, **options):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, root, **options)
    return str(caught.value)


@quiet
@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_c_gives_the_rows_of_the_severity(tmp_path, classes):
    make_cifar_c(tmp_path, classes=classes, per_severity=100)
    home = tmp_path / f"CIFAR-{classes}-C"
    raw, labels = np.load(home / "fog.npy"), np.load(home / "labels.npy")
    for severity in (1, 5):
        benchmark = open_benchmark(f"cifar{classes}_c", tmp_path, severity=severity)
        assert tuple(benchmark.domains) == CORRUPTIONS
        assert benchmark.classes == (CIFAR10_CLASSES if classes == 10 else CIFAR100_CLASSES)
        fog, start = benchmark["fog"], (severity - 1) * 100
        assert fog.labels.tolist() == labels[start : start + 100].tolist()
        np.testing.assert_array_equal(np.asarray(fog.load(3)), raw[start + 3])


def test_cifar_c_warns_of_the_count(tmp_path):
    make_cifar_c(tmp_path, corruptions=["fog"])
    with pytest.warns(DataWarning, match="CIFAR-10-C: fog 40 instead of 10,000"):
        open_benchmark("cifar10_c", tmp_path, domains=["fog"])


@quiet
def test_cifar_c_extra_corruptions_only_by_name(tmp_path):
    make_cifar_c(tmp_path, corruptions=["fog", "spatter"])
    assert list(open_benchmark("cifar10_c", tmp_path, domains=["spatter", "fog"]).domains) == ["fog", "spatter"]
    assert "gaussian_noise.npy, shot_noise.npy" in error_of("cifar10_c", tmp_path)


@pytest.mark.parametrize("severity", [0, 6, "5"])
def test_severities_that_do_not_exist(tmp_path, severity):
    with pytest.raises(SettingError, match="severity="):
        open_benchmark("cifar10_c", tmp_path, severity=severity)


@quiet
def test_cifar_c_files_that_are_bad(tmp_path):
    make_cifar_c(tmp_path, corruptions=["fog"])
    fog = tmp_path / "CIFAR-10-C" / "fog.npy"
    good = fog.read_bytes()
    fog.write_bytes(good[: len(good) // 2])
    assert "fog.npy: damaged, cut short" in error_of("cifar10_c", tmp_path, domains=["fog"])
    fog.write_bytes(b"<html>quota exceeded</html>")
    assert "an HTML page" in error_of("cifar10_c", tmp_path, domains=["fog"])
    np.save(fog, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "not a plain array" in error_of("cifar10_c", tmp_path, domains=["fog"])
    np.save(fog, np.zeros((201, 32, 32, 3), np.uint8))
    assert "expected five severities" in error_of("cifar10_c", tmp_path, domains=["fog"])
    np.save(fog, np.zeros((200, 32, 32, 3), np.float32))
    assert "float32 [40, 32, 32, 3]; expected uint8" in error_of("cifar10_c", tmp_path, domains=["fog"])
    fog.write_bytes(good)
    (tmp_path / "CIFAR-10-C" / "labels.npy").unlink()
    assert "labels.npy missing" in error_of("cifar10_c", tmp_path, domains=["fog"])


@quiet
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("form", ["npz", "binary", "folders"])
def test_clean_cifar_in_each_form(tmp_path, form, classes):
    make_cifar(tmp_path, form, classes=classes, count=200)
    benchmark = open_benchmark(f"cifar{classes}", tmp_path)
    images = benchmark["test"]
    assert list(benchmark.domains) == ["test"]
    assert len(images) == 200
    assert np.bincount(images.labels).tolist() == [200 // classes] * classes
    assert images.load(0).size == (32, 32)


@quiet
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("form", ["npz", "binary"])
def test_clean_cifar_keeps_the_order_and_the_pixels_of_its_file(tmp_path, form, classes):
    make_cifar(tmp_path, form, classes=classes, count=200)
    images = open_benchmark(f"cifar{classes}", tmp_path)["test"]
    pixels, labels = shape_arrays(200, classes)
    assert images.labels.tolist() == labels.tolist()
    np.testing.assert_array_equal(np.asarray(images.load(7)), pixels[7])


@quiet
@pytest.mark.parametrize("classes", [10, 100])
def test_clean_cifar_training_split_and_direct_paths(tmp_path, classes):
    make_cifar(tmp_path, "binary", classes=classes, split="train", count=200)
    home = tmp_path / ("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    assert (
        open_benchmark(f"cifar{classes}", home, split="train")["train"].labels.tolist()
        == shape_arrays(200, classes)[1].tolist()
    )
    make_cifar(tmp_path, "npz", classes=classes, count=200)
    assert len(open_benchmark(f"cifar{classes}", tmp_path / f"cifar{classes}_test.npz")) == 200
    with pytest.raises(SettingError, match="split='valid'"):
        open_benchmark("cifar10", tmp_path, split="valid")


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_pickled_cifar_is_refused_and_not_read(tmp_path, name, folder):
    (tmp_path / folder).mkdir()
    marker = tmp_path / "ran"
    payload = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    for file in ("data_batch_1", "test_batch", "test", "train", "batches.meta", "meta"):
        (tmp_path / folder / file).write_bytes(payload)
    for root in (tmp_path, tmp_path / folder):
        message = error_of(name, root)
        assert "pickles, which can run any code" in message
        assert "binary version" in message
    assert not marker.exists()


@quiet
def test_clean_cifar_files_that_are_bad(tmp_path):
    make_cifar(tmp_path, "binary")
    batch = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    batch.write_bytes(batch.read_bytes()[:-5])
    assert "not whole records of 3,073" in error_of("cifar10", tmp_path)
    np.savez(tmp_path / "cifar10_test.npz", pictures=np.zeros(3))
    assert "but not ['images', 'labels']" in error_of("cifar10", tmp_path)
    np.savez(tmp_path / "cifar10_test.npz", images=np.zeros((1, 32, 32, 3), np.uint8), labels=[0], classes=["x"])
    assert "its classes are not those of CIFAR-10" in error_of("cifar10", tmp_path)
    np.savez(tmp_path / "cifar10_test.npz", images=np.zeros((1, 32, 32, 3), np.uint8), labels=[17])
    assert "labels from 17 to 17" in error_of("cifar10", tmp_path)
    make_cifar(tmp_path, "npz")
    path = tmp_path / "cifar10_test.npz"
    damaged = bytearray(path.read_bytes())
    damaged[400:420] = bytes(20)
    path.write_bytes(damaged)
    assert "cifar10_test.npz: damaged, cut short" in error_of("cifar10", tmp_path)
