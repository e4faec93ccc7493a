"""Images of no known class, for streams that do not hold known classes only."""

from dataclasses import replace

import numpy as np

from dpl.data.sets import NO_LABEL, ImageSet

__all__ = ["noise_images", "without_labels"]


def noise_images(like: ImageSet, count: int, *, seed: int = 0) -> ImageSet:
    """Return images of uniform noise, without labels, with the classes of `like` and the size of its first image."""
    width, height = like.load(0).size
    pixels = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return ImageSet.from_array("noise", pixels, np.full(count, NO_LABEL), like.classes)


def without_labels(images: ImageSet, classes: tuple[str, ...]) -> ImageSet:
    """Return images that show none of these classes, as a set of them: each has the label -1."""
    return replace(images, classes=classes, labels=np.full(len(images), NO_LABEL))
