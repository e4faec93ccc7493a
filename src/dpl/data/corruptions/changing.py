"""Corruptions that change continuously, for streams without borders between domains.

Press et al., RDumb: A Simple Approach That Questions Our Progress in Continual Test-Time Adaptation, NeurIPS 2023,
define the benchmark CCC. Two corruptions are applied to each image. While one fades out in steps of a quarter of a
severity, the next fades in. Differences from the authors' stream: they choose the steps so that a ResNet-50 keeps a
constant accuracy, by a table that is not public here; in this walk the sum of both severities is constant instead.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dpl.core.errors import SettingError
from dpl.data.corruptions.apply import STRENGTHS, apply_strengths, check_images, check_settings, is_small
from dpl.data.corruptions.arrays import Images
from dpl.data.facts import CORRUPTIONS

__all__ = ["CorruptionPair", "changing_corruptions", "corrupt_pair"]

_HIGHEST = 5.0


class CorruptionPair(NamedTuple):
    """Two corruptions with their severities, 0 (none) to 5; fractions lie between the published strengths."""

    first: str
    first_severity: float
    second: str
    second_severity: float


def changing_corruptions(
    names: Sequence[str] = CORRUPTIONS, *, severity: float = _HIGHEST, increment: float = 0.25, seed: int = 0
) -> Iterator[CorruptionPair]:
    """Yield an endless walk: each corruption in turn fades into the next, in a new random order for every round.

    `severity` is the sum of both severities, `increment` the change between two pairs.
    """
    check_settings(names, (), seed=seed, constants="auto")
    if len(set(names)) < 2:
        raise SettingError(f"names={tuple(names)!r}: expected at least two corruptions that can follow each other")
    if not 0 < increment <= severity <= _HIGHEST:
        raise SettingError(f"severity={severity!r}, increment={increment!r}: expected 0 < increment <= severity <= 5")
    return _walk(list(dict.fromkeys(names)), severity, math.ceil(severity / increment), np.random.default_rng(seed))


def _walk(names: list[str], severity: float, steps: int, rng: np.random.Generator) -> Iterator[CorruptionPair]:
    current = None
    while True:
        for name in rng.permutation(names).tolist():
            if current is not None and name != current:
                for step in range(steps):
                    yield CorruptionPair(current, severity * (1 - step / steps), name, severity * step / steps)
            current = name


def corrupt_pair(
    images: Images, pair: CorruptionPair, *, seed: int = 0, start: int = 0, constants: str = "auto"
) -> Images:
    """Return uint8 images [N, H, W, 3] under both corruptions; the other arguments are those of `corrupt`."""
    check_settings((pair.first, pair.second), (), seed=seed, start=start, constants=constants)
    check_images(images)
    if constants == "auto":
        constants = "cifar" if is_small(images) else "imagenet"
    for name, severity in ((pair.first, pair.first_severity), (pair.second, pair.second_severity)):
        if not 0 <= severity <= _HIGHEST:
            raise SettingError(f"severity={severity!r} of {name}: expected a number from 0 to 5")
        images = _at_severity(images, name, severity, seed, start, constants)
    return images


def _at_severity(images: Images, name: str, severity: float, seed: int, start: int, constants: str) -> Images:
    """Corrupt at a severity between the published ones: strengths in between, and below 1 a blend with the original."""
    if severity == 0:
        return images
    published = STRENGTHS[constants][name]
    below, share = max(math.floor(severity), 1), severity - math.floor(severity)
    lower, upper = published[below - 1], published[min(below, len(published) - 1)]
    blend = share if severity < 1 else 0.0
    strengths = lower if severity < 1 else tuple(_between(a, b, share) for a, b in zip(lower, upper, strict=True))
    corrupted = apply_strengths(images, name, strengths, (seed, below), start)
    if not blend:
        return corrupted
    return np.rint((1 - blend) * images + blend * corrupted.astype(np.float32)).astype(np.uint8)


def _between(lower: float, upper: float, share: float) -> float:
    """Return a strength between two published ones; whole numbers (radii, rounds, qualities) stay whole."""
    value = (1 - share) * lower + share * upper
    return round(value) if isinstance(lower, int) and isinstance(upper, int) else value
