"""A user's own folder of images."""

import numpy as np
import pytest
from PIL import Image

from data.make import make_folder
from dpl.core.errors import DataError
from dpl.data import open_folder


def test_sub_folders_are_classes(tmp_path):
    images = open_folder(make_folder(tmp_path, classes=("dog", "cat"), per_class=2))
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0, 0, 1, 1]
    assert images.labelled
    assert images.location(0).endswith("mine/cat/pic_001_000.jpg")


def test_numbered_folders_are_sorted_as_numbers(tmp_path):
    names = [str(number) for number in range(12)]
    assert open_folder(make_folder(tmp_path, classes=names, per_class=1)).classes == tuple(names)


def test_the_networks_order_of_classes_and_absent_ones(tmp_path):
    images = open_folder(make_folder(tmp_path, per_class=1), classes=("dog", "fox", "cat"))
    assert images.classes == ("dog", "fox", "cat")
    assert images.labels.tolist() == [2, 0]


def test_a_folder_that_is_no_class(tmp_path):
    with pytest.raises(DataError, match=r"'cat' is not one of the classes.*Did you mean 'cats'"):
        open_folder(make_folder(tmp_path), classes=("cats", "dog"))


def test_a_flat_folder_has_no_labels(tmp_path):
    images = open_folder(make_folder(tmp_path, labelled=False))
    assert len(images) == 6
    assert not images.labelled
    assert set(images.labels.tolist()) == {-1}
    assert images.classes == ()
    assert open_folder(tmp_path / "mine", classes=("cat", "dog")).classes == ("cat", "dog")


def test_images_beside_class_folders(tmp_path):
    folder = make_folder(tmp_path)
    Image.new("RGB", (4, 4)).save(folder / "loose.png")
    with pytest.raises(DataError, match="1 images beside the folders cat, dog"):
        open_folder(folder)


def test_no_images(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(DataError, match="no image found"):
        open_folder(tmp_path)


def test_an_empty_class_folder(tmp_path):
    folder = make_folder(tmp_path)
    (folder / "fox").mkdir()
    with pytest.raises(DataError, match="no image in the class folders fox"):
        open_folder(folder)


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        open_folder(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="a file; expected a folder"):
        open_folder(tmp_path / "file")


def test_hidden_and_system_folders_do_not_count(tmp_path):
    folder = make_folder(tmp_path)
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (folder / name).mkdir()
    assert open_folder(folder).classes == ("cat", "dog")


def test_a_class_may_begin_with_an_underscore(tmp_path):
    assert open_folder(make_folder(tmp_path, classes=("_none_", "cat"))).classes == ("_none_", "cat")


def test_own_images_are_read_as_seen(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_folder(tmp_path).load(0).size == (10, 20)


def test_the_pixel_limit_is_an_option(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png: 20 x 20"):
        open_folder(tmp_path, max_pixels=399).load(0)
