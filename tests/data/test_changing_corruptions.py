"""Corruptions that fade into each other: the walk, and strengths between the published ones."""

from itertools import islice, pairwise

import numpy as np
import pytest

from dpl.core.errors import SettingError
from dpl.data import ImageSet
from dpl.data.corruptions import (
    CORRUPTIONS,
    CorruptionPair,
    changing_corruptions,
    changing_images,
    corrupt,
    corrupt_pair,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)


def distance(corrupted: np.ndarray) -> float:
    return float(np.abs(corrupted.astype(float) - IMAGES).mean())


def test_each_step_changes_both_severities_by_one_increment():
    pairs = list(islice(changing_corruptions(seed=1), 400))
    assert {pair.first for pair in pairs} == set(CORRUPTIONS)
    for before, after in pairwise(pairs):
        assert after.first_severity + after.second_severity == pytest.approx(5)
        if after.first == before.first:
            assert before.first_severity - after.first_severity == pytest.approx(0.25)
        else:
            assert after.first == before.second
            assert (after.first_severity, after.second_severity) == (5, 0)


def test_the_seed_decides_the_walk():
    first, again, other = (list(islice(changing_corruptions(seed=seed), 300)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_whole_severities_are_the_published_ones(name):
    for severity in (1, 3, 5):
        pair = CorruptionPair(name, severity, "fog", 0)
        np.testing.assert_array_equal(corrupt_pair(IMAGES, pair), corrupt(IMAGES, name, severity))


@pytest.mark.parametrize("name", ["gaussian_noise", "brightness", "contrast", "fog"])
def test_fractions_lie_between(name):
    steps = [distance(corrupt_pair(IMAGES, CorruptionPair(name, level, "fog", 0))) for level in (0, 0.5, 1, 1.5, 2)]
    assert steps[0] == 0
    assert steps == sorted(steps)


def test_every_corruption_works_at_every_quarter():
    for name in CORRUPTIONS:
        for level in np.arange(0, 5.25, 0.25):
            assert corrupt_pair(IMAGES[:1], CorruptionPair(name, level, "contrast", 0)).shape == (1, 32, 32, 3)


def test_both_corruptions_are_applied():
    expected = corrupt(corrupt(IMAGES, "fog", 3), "contrast", 2)
    np.testing.assert_array_equal(corrupt_pair(IMAGES, CorruptionPair("fog", 3, "contrast", 2)), expected)


def test_wrong_values_are_refused():
    with pytest.raises(SettingError, match="at least two corruptions"):
        changing_corruptions(["fog"])
    with pytest.raises(SettingError, match="0 < increment <= severity <= 5"):
        changing_corruptions(severity=6)
    with pytest.raises(SettingError, match="expected a number from 0 to 5"):
        corrupt_pair(IMAGES, CorruptionPair("fog", -1, "snow", 0))


def test_images_change_with_their_place_in_the_stream():
    clean = ImageSet.from_array("clean", IMAGES, [0, 1, 2], ["a", "b", "c"])
    changed = changing_images(clean, [2, 0, 1], every=2, names=("fog", "contrast"), walk_seed=4, seed=7)
    pairs = list(islice(changing_corruptions(("fog", "contrast"), seed=4), 2))
    for place, image in enumerate((2, 0, 1)):
        expected = corrupt_pair(IMAGES[[image]], pairs[place // 2], seed=7, start=place)[0]
        np.testing.assert_array_equal(np.asarray(changed.load(image)), expected)
    np.testing.assert_array_equal(np.asarray(changed.subset([1]).load(0)), np.asarray(changed.load(1)))
    assert (changed.labels.tolist(), changed.location(1)) == ([0, 1, 2], clean.location(1))
    other = changing_images(clean, every=2, names=("fog", "contrast"), walk_seed=4, seed=7)
    assert len({b"".join(images.source.identity()) for images in (clean, changed, other)}) == 3


def test_images_refuse_a_wrong_order_and_no_steps():
    clean = ImageSet.from_array("clean", IMAGES, [0, 1, 2], ["a", "b", "c"])
    with pytest.raises(SettingError, match="every must be a whole number of at least 1"):
        changing_images(clean, every=0)
    with pytest.raises(SettingError, match=r"indices from 0 to 3; the set has 0\.\.2"):
        changing_images(clean, [0, 3], every=1)
