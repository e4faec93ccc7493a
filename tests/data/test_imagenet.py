"""ImageNet's validation images and ImageNet-C: labels from folder names, images by lists."""

import shutil
import warnings

import pytest
from PIL import Image

from data.make import make_imagenet, make_imagenet_c
from dpl.core.errors import DataError, SettingError
from dpl.data import DataWarning, open_benchmark
from dpl.data.facts import CORRUPTIONS

WORDNET = ("n01440764", "n01443537", "n01484850")
quiet = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def error_of(name, root, **options):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, root, **options)
    return str(caught.value)


@quiet
def test_imagenet_by_number(tmp_path):
    make_imagenet(tmp_path, classes=("0003", "0010", "0999"))
    for root in (tmp_path, tmp_path / "imagenet2012", tmp_path / "imagenet2012" / "val"):
        images = open_benchmark("imagenet", root)["val"]
        assert sorted(set(images.labels.tolist())) == [3, 10, 999]
        assert len(images.classes) == 1000
        assert images.classes[10] == "0010"


@quiet
def test_imagenet_by_all_wordnet_ids(tmp_path):
    names = [f"n{number:08d}" for number in range(5_000, 6_000)]
    for name in names:
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / "val" / name / "a.png")
    images = open_benchmark("imagenet", tmp_path)["val"]
    assert images.labels.tolist() == list(range(1000))
    assert images.classes == tuple(names)


@quiet
def test_imagenet_by_some_wordnet_ids_needs_the_order(tmp_path):
    make_imagenet(tmp_path, classes=WORDNET)
    assert "3 class folders; labels follow from the sorted names only if all 1,000" in error_of("imagenet", tmp_path)
    order = ("n00000001", WORDNET[2], WORDNET[0], WORDNET[1])
    (tmp_path / "names.txt").write_text("\n".join(order))
    for classes in (order, tmp_path / "names.txt", str(tmp_path / "names.txt")):
        images = open_benchmark("imagenet", tmp_path, classes=classes)["val"]
        assert images.classes == order
        assert images.labels.tolist() == [2] * 3 + [3] * 3 + [1] * 3
    assert "is not one of the classes" in error_of("imagenet", tmp_path, classes=order[:3])


@quiet
def test_imagenet_c(tmp_path):
    make_imagenet_c(tmp_path, severities=(3, 5))
    benchmark = open_benchmark("imagenet_c", tmp_path, severity=3)
    assert tuple(benchmark.domains) == CORRUPTIONS
    assert len(benchmark["fog"]) == 12
    assert "/fog/3/0000/" in benchmark["fog"].location(0)
    assert benchmark["fog"].labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


@quiet
def test_imagenet_c_inside_the_groups_of_its_archives(tmp_path):
    make_imagenet_c(tmp_path, corruptions=["fog"])
    (tmp_path / "ImageNet-C" / "weather").mkdir()
    (tmp_path / "ImageNet-C" / "fog").rename(tmp_path / "ImageNet-C" / "weather" / "fog")
    assert len(open_benchmark("imagenet_c", tmp_path, domains="fog")) == 12


@pytest.mark.parametrize(
    "lines",
    [
        ["0002/ILSVRC2012_val_002_001.JPEG", "0000/ILSVRC2012_val_000_002.JPEG"],
        ["n01443537/ILSVRC2012_val_002_001.JPEG", "n01440764/ILSVRC2012_val_000_002.JPEG"],
        ["ILSVRC2012_val_002_001", "ILSVRC2012_val_000_002", ""],
        ["ILSVRC2012_val_002_001.JPEG 2", "ILSVRC2012_val_000_002.JPEG 0"],
    ],
    ids=["paths", "paths of other folders", "ids", "with labels"],
)
def test_imagenet_c_by_a_list(tmp_path, lines):
    make_imagenet_c(tmp_path, corruptions=["fog", "snow"])
    (tmp_path / "list.txt").write_text("\r\n".join(lines))
    (tmp_path / "ImageNet-C" / "fog" / "5" / "0007").mkdir()
    (tmp_path / "ImageNet-C" / "snow" / "5" / "0007").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a list fixes the count; a class without a listed image may be empty
        benchmark = open_benchmark("imagenet_c", tmp_path, domains=["fog", "snow"], images=tmp_path / "list.txt")
    for images in benchmark.domains.values():
        assert images.labels.tolist() == [2, 0]
        assert images.location(0).endswith("/0002/ILSVRC2012_val_002_001.JPEG")


@quiet
def test_imagenet_c_lists_that_are_wrong(tmp_path):
    make_imagenet_c(tmp_path, corruptions=["fog"])
    listed = tmp_path / "list.txt"
    listed.write_text("ILSVRC2012_val_002_001\nILSVRC2012_val_777_001\n")
    message = error_of("imagenet_c", tmp_path, domains=["fog"], images=listed)
    assert "1 images listed in" in message
    assert "ILSVRC2012_val_777_001" in message
    listed.write_text("\n")
    assert "the file is empty" in error_of("imagenet_c", tmp_path, domains=["fog"], images=listed)
    assert "cannot be read" in error_of("imagenet_c", tmp_path, domains=["fog"], images=tmp_path / "none.txt")


@quiet
def test_imagenet_c_that_is_half_copied(tmp_path):
    make_imagenet_c(tmp_path, corruptions=["fog", "snow"])
    home = tmp_path / "ImageNet-C"
    assert "gaussian_noise/5 is missing" in error_of("imagenet_c", tmp_path)
    assert "fog/4 is missing" in error_of("imagenet_c", tmp_path, domains=["fog"], severity=4)
    shutil.rmtree(home / "snow" / "5" / "0001")
    assert "class folders differ from" in error_of("imagenet_c", tmp_path, domains=["fog", "snow"])
    (home / "snow" / "5" / "0001").mkdir()
    assert "no image in the class folders 0001" in error_of("imagenet_c", tmp_path, domains=["fog", "snow"])


def test_imagenet_warns_of_the_count(tmp_path):
    make_imagenet(tmp_path)
    with pytest.warns(DataWarning, match="ImageNet: val 12 instead of 50,000"):
        open_benchmark("imagenet", tmp_path)


def test_severities_that_do_not_exist(tmp_path):
    with pytest.raises(SettingError, match="severity=6"):
        open_benchmark("imagenet_c", tmp_path, severity=6)
