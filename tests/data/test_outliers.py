"""Images of no known class: noise, and other sets without their labels."""

import numpy as np

from dpl.data import ImageSet
from dpl.data.outliers import noise_images, without_labels

KNOWN = ImageSet.from_array("known", np.zeros((2, 6, 8, 3), np.uint8), [0, 1], ["cat", "dog"])


def test_noise_has_the_size_and_classes_of_the_known_images_and_follows_the_seed():
    noise, again, other = (noise_images(KNOWN, 3, seed=seed) for seed in (1, 1, 2))
    assert (len(noise), noise.classes, noise.load(0).size) == (3, KNOWN.classes, (8, 6))
    assert not noise.labelled
    assert noise.load(2).tobytes() == again.load(2).tobytes() != other.load(2).tobytes()


def test_other_images_lose_their_labels_and_keep_their_pixels():
    others = ImageSet.from_array("others", np.full((4, 5, 5, 3), 9, np.uint8), [0, 1, 2, 3], ["a", "b", "c", "d"])
    outliers = without_labels(others, KNOWN.classes)
    assert outliers.labels.tolist() == [-1] * 4
    assert outliers.classes == KNOWN.classes
    assert outliers.load(3).tobytes() == others.load(3).tobytes()
