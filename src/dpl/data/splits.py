"""The split of a domain into a large and a small part, as DomainBed makes it: same seed, same images."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from dpl.errors import SettingError

__all__ = ["domain_split", "seed_hash"]


def seed_hash(*parts: object) -> int:
    """Return a seed below 2^31 made from any values, by DomainBed's rule."""
    digest = hashlib.md5(str(parts).encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 2**31


def domain_split(
    length: int, domain: int, *, seed: int = 0, held_out: float = 0.2
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the large and of the held-out part of a domain with `length` images.

    `domain` is its number in the benchmark's order and `seed` that of the trial. In a source domain the held-out part
    validates; of a target domain the large part is the test stream.
    """
    if length < 1 or not 0 <= held_out < 1:
        raise SettingError(f"length={length}, held_out={held_out}: expected a positive number and a share in [0, 1)")
    order = np.arange(length)
    np.random.RandomState(seed_hash(seed, domain)).shuffle(order)
    cut = int(length * held_out)
    return order[cut:], order[:cut]
