"""Orders within a segment, as positions: each returns every one exactly once."""

import random
from hashlib import sha256

import numpy as np

from dpl.streams.domain import IntArray

__all__ = ["by_class", "dirichlet", "python_shuffle", "seeded"]


def seeded(seed: int, *parts: str | int) -> np.random.Generator:
    """Return a generator for one part of a plan, independent of all other parts."""
    digest = sha256(repr(parts).encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:16], "little")])


def python_shuffle(size: int, seed: int) -> IntArray:
    """Shuffle with Python's generator, newly seeded: equal lengths get equal orders."""
    positions = list(range(size))
    random.Random(seed).shuffle(positions)  # noqa: S311 - an order to reproduce, not a secret
    return np.array(positions, dtype=np.int64)


def by_class(labels: IntArray, base: IntArray) -> IntArray:
    """Sort by ascending label; samples of a class stay in the order `base` has them."""
    return base[np.argsort(labels[base], kind="stable")]


def dirichlet(labels: IntArray, base: IntArray, delta: float, generator: np.random.Generator) -> IntArray:
    """Correlate the classes in time, as docs/protocols.md says: small `delta`, and a class arrives almost all at once.

    One slot is always open, so that a single pass places every sample. A slot may be empty.
    """
    ordered = by_class(labels, base)
    groups = np.split(ordered, np.flatnonzero(np.diff(labels[ordered])) + 1)
    slots: list[list[IntArray]] = [[] for _ in groups]
    filled = np.zeros(len(groups), dtype=np.int64)
    for members in groups:
        unfilled = np.flatnonzero(filled < len(labels) / len(groups))
        shares = generator.dirichlet(np.full(len(unfilled), delta))
        cuts = (np.cumsum(shares[:-1]).clip(0, 1) * len(members)).astype(np.int64)
        bounds = np.concatenate(([0], cuts, [len(members)]))
        for piece in np.flatnonzero(np.diff(bounds)):
            slots[unfilled[piece]].append(members[bounds[piece] : bounds[piece + 1]])
        filled[unfilled] += np.diff(bounds)
    return np.concatenate([slot[i] for slot in slots for i in generator.permutation(len(slot))])
