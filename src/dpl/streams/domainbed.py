"""DomainBed's hashed split of a domain, which selects the images of domain generalisation results."""

from hashlib import md5
from typing import NamedTuple

import numpy as np

from dpl.core.errors import SettingError
from dpl.core.settings import whole_number
from dpl.streams.domain import IntArray

__all__ = ["Split", "domainbed_split", "seed_hash"]


class Split(NamedTuple):
    """Positions of the two parts of a domain, in the order of the split's shuffle."""

    inside: IntArray
    outside: IntArray


def seed_hash(*parts: str | int) -> int:
    """Derive a seed below 2^31 from `parts` by DomainBed's rule: the MD5 of the tuple as Python prints it."""
    return int(md5(str(parts).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31


def domainbed_split(size: int, *, domain_index: int, trial_seed: int = 0, holdout: float = 0.2) -> Split:
    """Split a domain of `size` samples into the part that is streamed or trained on, and the part held out.

    `domain_index` counts the benchmark's domains in the sorted order of their folder names. Source domains train on
    the inside and validate on the outside; of the target domain, the inside is the test stream.
    """
    size = whole_number("size", size, least=1)
    if not 0 <= holdout <= 1:
        raise SettingError(f"holdout must be a fraction from 0 to 1, got {holdout!r}")
    seed = seed_hash(
        whole_number("trial_seed", trial_seed, least=0), whole_number("domain_index", domain_index, least=0)
    )
    positions = np.arange(size, dtype=np.int64)
    np.random.RandomState(seed).shuffle(positions)
    held_out = int(size * holdout)
    return Split(inside=positions[held_out:], outside=positions[:held_out])
