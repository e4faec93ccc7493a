"""Image sets: what they check, and that parts of them are the right parts."""

import numpy as np
import pytest
from PIL import Image

from data.make import make_folder, shape_arrays
from dpl.core.errors import DataError, SettingError
from dpl.data.folders import open_folder
from dpl.data.sets import Arrays, Benchmark, Files, ImageSet

PIXELS, LABELS = shape_arrays(12, 3)
NAMES = ("disc", "square", "triangle")


def arrays():
    return ImageSet.from_array("toy", PIXELS, LABELS, NAMES)


def test_a_subset_has_the_images_and_labels_asked_for():
    part = arrays().subset([5, 2, 2]).subset([1, 0])
    assert part.labels.tolist() == LABELS[[2, 5]].tolist()
    for place, row in enumerate((2, 5)):
        np.testing.assert_array_equal(np.asarray(part.load(place)), PIXELS[row])
    assert [part.location(place) for place in range(2)] == ["toy[2]", "toy[5]"]
    assert len(part) == 2
    assert part.classes == NAMES


def test_a_subset_of_files(tmp_path):
    images = open_folder(make_folder(tmp_path))
    part = images.subset(np.array([4, 1]))
    assert [part.location(0), part.location(1)] == [images.location(4), images.location(1)]
    assert part.labels.tolist() == [1, 0]
    assert part.load(0).size == (32, 32)


@pytest.mark.parametrize("indices", [[12], [-1], [0.5], [[0]]])
def test_indices_outside_the_set_are_refused(indices):
    with pytest.raises(SettingError, match="indices"):
        arrays().subset(indices)


def test_an_empty_subset_is_a_set():
    assert len(arrays().subset([])) == 0


@pytest.mark.parametrize(("labels", "message"), [([0], "1,.* labels for 12"), ([3] * 12, "3 to 3"), ([-2] * 12, "-2")])
def test_labels_must_fit(labels, message):
    with pytest.raises(DataError, match=message):
        ImageSet("toy", NAMES, np.array(labels), Arrays(PIXELS))


@pytest.mark.parametrize("pixels", [PIXELS.astype(np.float32), PIXELS[..., :1], PIXELS[0]])
def test_pixels_must_be_8_bit_rgb(pixels):
    with pytest.raises(DataError, match=r"expected uint8 \[N, height, width, 3\]"):
        Arrays(pixels)


def test_labelled_says_whether_every_image_has_a_label():
    assert arrays().labelled
    assert not ImageSet("toy", NAMES, np.full(12, -1), Arrays(PIXELS)).labelled


def test_a_domain_is_found_by_any_spelling():
    benchmark = Benchmark("toy", {"Real World": arrays(), "Art": arrays().subset([0])}, NAMES)
    assert len(benchmark["real_world"]) == len(benchmark["RealWorld"]) == 12
    assert len(benchmark) == 13
    with pytest.raises(SettingError, match="Did you mean 'Real World'"):
        benchmark["Rael World"]


def test_identity_changes_with_the_files_and_with_how_they_are_read(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    files = Files(tmp_path, ("a.png", "gone.png"))
    before = list(files.identity())
    assert before == list(files.identity())
    assert before != list(Files(tmp_path, ("a.png", "gone.png"), as_stored=True).identity())
    Image.new("RGB", (4, 5)).save(tmp_path / "a.png")
    assert before != list(files.identity())


def test_identity_of_an_array_is_its_pixels():
    same, other = arrays().subset([0, 1]), arrays().subset([1, 0])
    assert list(same.source.identity()) == list(Arrays(PIXELS[:2]).identity())
    assert list(same.source.identity()) != list(other.source.identity())


def test_what_is_printed_is_short():
    assert repr(arrays()) == "ImageSet('toy', 12 images, 3 classes)"
    assert len(repr(arrays().source)) < 100
