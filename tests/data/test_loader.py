"""Batches: order, bits and errors do not depend on the number of threads; training resumes exactly."""

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from data.make import make_folder, shape_arrays
from dpl.core.errors import DataError, SettingError
from dpl.data import ImageSet, batches, open_folder, resize_crop, square, training, training_batches, unchanged
from dpl.data.loader import in_order
from dpl.data.transforms import to_float

PIXELS, LABELS = shape_arrays(23, 5)
ARRAYS = ImageSet.from_array("toy", PIXELS, LABELS, ("a", "b", "c", "d", "e"))


@pytest.fixture
def files(tmp_path):
    return open_folder(make_folder(tmp_path, classes=("a", "b", "c"), per_class=7))


def spoil(image_set, index):
    with open(image_set.location(index), "r+b") as stream:
        stream.truncate(100)


def same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert one.labels.tolist() == other.labels.tolist()
        assert one.indices.tolist() == other.indices.tolist()
        assert one.domains.tolist() == other.domains.tolist()
        assert one.failed == other.failed


def test_a_batch_is_what_it_says(files):
    order = [20, 3, 11, 0, 7]
    first, second = batches(files, order, square(16), 3)
    assert first.images.shape == (3, 3, 16, 16)
    assert first.images.dtype == torch.float32
    assert first.indices.tolist() == [20, 3, 11]
    assert second.indices.tolist() == [0, 7]
    assert first.labels.tolist() == [2, 0, 1]
    assert torch.equal(first.images[1], square(16)(files.load(3)))
    assert len(second) == 2


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_files_are_the_same_with_any_number_of_threads(files, workers, prefetch):
    spoil(files, 4)
    order = np.random.default_rng(0).permutation(len(files))
    alone = list(batches(files, order, square(24), 4))
    assert sum(len(batch.failed) for batch in alone) == 1
    same(alone, list(batches(files, order, square(24), 4, workers=workers, prefetch=prefetch)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [unchanged(), square(32)])
def test_arrays_come_out_as_they_are(workers, transform):
    order = np.random.default_rng(0).permutation(23)
    found = list(batches(ARRAYS, order, transform, 8, workers=workers))
    assert [len(batch) for batch in found] == [8, 8, 7]
    assert torch.equal(torch.cat([batch.images for batch in found]), to_float(PIXELS[order]))
    assert torch.cat([batch.labels for batch in found]).tolist() == LABELS[order].tolist()
    assert torch.cat([batch.indices for batch in found]).tolist() == order.tolist()


def test_none_means_all_and_an_empty_list_means_none():
    assert sum(len(batch) for batch in batches(ARRAYS, None, unchanged(), 10)) == 23
    assert list(batches(ARRAYS, [], unchanged(), 10)) == []


def test_part_of_an_array():
    part = ARRAYS.subset([5, 9, 2])
    (batch,) = batches(part, [2, 0], unchanged(), 8)
    assert torch.equal(batch.images, to_float(PIXELS[[2, 5]]))
    assert batch.indices.tolist() == [2, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_skipped_and_named(files, workers):
    for index in (1, 2, 3):
        spoil(files, index)
    found = list(batches(files, range(6), square(16), 3, workers=workers))
    assert [batch.indices.tolist() for batch in found] == [[0], [4, 5]]
    assert [path for path, _ in found[0].failed] == [files.location(1), files.location(2)]
    assert "cut short" in found[1].failed[0][1]
    assert not found[1].failed[0][1].startswith("/")


def test_a_batch_of_nothing_but_failures_is_empty(files):
    spoil(files, 0)
    spoil(files, 1)
    first, second = batches(files, [0, 1, 2], square(16), 2)
    assert len(first) == 0
    assert first.images.shape[:2] == (0, 3)
    assert first.labels.dtype == torch.int64
    assert len(first.failed) == 2
    assert len(second) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_raise_comes_in_its_turn(files, workers):
    spoil(files, 5)
    stream = batches(files, None, square(16), 4, workers=workers, on_error="raise")
    assert next(stream).indices.tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match=files.location(5)):
        next(stream)


def test_errors_of_the_transform_name_the_file(tmp_path):
    Image.new("RGB", (5_000_000, 1)).save(tmp_path / "strip.png")
    (batch,) = batches(open_folder(tmp_path), None, resize_crop(32, 32), 1)
    assert batch.failed[0][0].endswith("strip.png")
    assert "too narrow to be resized" in batch.failed[0][1]


def test_images_of_different_sizes_need_a_transform(tmp_path):
    for name, size in (("a", (8, 8)), ("b", (9, 8))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    with pytest.raises(DataError, match=r"b\.png: 9 x 8 pixels after the transform, 8 x 8 before it"):
        list(batches(open_folder(tmp_path), None, unchanged(), 2))


def test_stopping_early_ends_the_threads(files):
    stream = batches(files, None, square(16), 2, workers=3)
    next(stream)
    assert any("dpl-data" in thread.name for thread in threading.enumerate())
    stream.close()
    assert not any("dpl-data" in thread.name for thread in threading.enumerate())


def test_no_more_is_read_ahead_than_asked_for():
    started = []
    stream = in_order(lambda item: started.append(item) or item, range(100), workers=2, ahead=5)
    assert next(stream) == 0
    assert len(started) <= 6
    assert list(stream) == list(range(1, 100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"workers": -1}, "workers=-1"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"indices": [23]}, r"indices from 23 to 23; the set has 0\.\.22"),
        ({"transform": training(32)}, "belongs to training_batches"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_read(options, message):
    arguments = {"indices": None, "transform": unchanged(), "batch_size": 4, **options}
    with pytest.raises(SettingError, match=message):
        batches(ARRAYS, **arguments)


# --- training


def sets():
    return [ARRAYS.subset(range(10)), ARRAYS.subset(range(10, 23))]


def test_training_batches_hold_so_many_of_each_domain():
    batch = next(training_batches(sets(), training(16), per_domain=6))
    assert batch.images.shape == (12, 3, 16, 16)
    assert batch.domains.tolist() == [0] * 6 + [1] * 6
    parts = sets()
    wanted = [parts[d].labels[i] for d, i in zip(batch.domains.tolist(), batch.indices.tolist(), strict=True)]
    assert batch.labels.tolist() == wanted


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_training_resumes_as_if_never_stopped(workers):
    whole = list(islice(training_batches(sets(), training(16), per_domain=4, seed=5), 7))
    resumed = training_batches(sets(), training(16), per_domain=4, seed=5, start_step=4, workers=workers)
    same(whole[4:], list(islice(resumed, 3)))


def test_training_does_not_touch_the_global_generators():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    list(islice(training_batches(sets(), training(16), per_domain=4), 3))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_seeds_steps_and_places_give_different_draws():
    alike = [ImageSet.from_array("one", PIXELS[:1], [0], ("a",))] * 2
    seen = set()
    for seed in (0, 1):
        for batch in islice(training_batches(alike, training(16), per_domain=4, seed=seed), 3):
            seen |= {image.numpy().tobytes() for image in batch.images}
    assert len(seen) == 2 * 3 * 8


def test_draws_are_uniform_and_with_replacement():
    small = [ARRAYS.subset(range(4))]
    drawn = [batch.indices for batch in islice(training_batches(small, unchanged(), per_domain=16), 250)]
    counts = torch.bincount(torch.cat(drawn), minlength=4)
    assert counts.sum() == 4000
    assert (counts - 1000).abs().max() < 130  # five standard deviations


def test_training_on_a_bad_image(files):
    for index in range(len(files)):
        spoil(files, index)
    with pytest.raises(DataError, match="cut short"):
        next(training_batches([files], training(16), per_domain=2))
    batch = next(training_batches([files], training(16), per_domain=2, on_error="skip"))
    assert (len(batch), len(batch.failed)) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"sets": []}, "sets: "), ({"seed": -1}, "seed=-1"), ({"per_domain": 0}, "per_domain=0")],
)
def test_wrong_training_settings(arguments, message):
    with pytest.raises(SettingError, match=message):
        training_batches(**{"sets": sets(), "transform": training(16), **arguments})


def test_an_empty_source_set_is_refused():
    with pytest.raises(SettingError, match=r"\[0\] images"):
        training_batches([ARRAYS.subset([])], training(16))
