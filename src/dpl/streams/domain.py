"""Domains of labelled samples, DomainBed's split of them, and the segments of sample numbers that make up a stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import md5
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dpl.core.errors import SettingError
from dpl.core.settings import whole_number

__all__ = ["Domain", "IntArray", "Segment", "Split", "batches", "domainbed_split", "seed_hash"]

IntArray: TypeAlias = npt.NDArray[np.int64]


class Domain:
    """Samples that share one shift: a domain, or a corruption at one severity.

    `samples` are the numbers of the samples in the data set, by default 0, 1, 2 ... The labels only order the stream;
    they are never passed to a method.
    """

    def __init__(
        self, name: str, labels: npt.ArrayLike, severity: int | None = None, samples: npt.ArrayLike | None = None
    ) -> None:
        if not isinstance(name, str) or not name:
            raise SettingError(f"the name of a domain must be a non-empty string, got {name!r}")
        self.name = name
        self.labels = _integers(f"labels of domain {name!r}", labels)
        count = len(self.labels)
        self.samples = _integers(f"samples of domain {name!r}", range(count) if samples is None else samples)
        if not count == len(self.samples) == len(np.unique(self.samples)):
            raise SettingError(f"samples of domain {name!r}: expected {count} different numbers, one for each label")
        level = f"severity of domain {name!r}"
        self.severity = None if severity is None else whole_number(level, severity, least=0)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def title(self) -> str:
        """The name together with the severity, as in `fog@5`."""
        return self.name if self.severity is None else f"{self.name}@{self.severity}"

    def subset(self, positions: npt.ArrayLike) -> "Domain":
        """Return the domain of the samples at these positions, with their present numbers."""
        kept = _integers("positions", positions)
        if kept.min() < 0 or kept.max() >= len(self):
            raise SettingError(f"positions must be in 0 ... {len(self) - 1} for domain {self.title!r}")
        return Domain(self.name, self.labels[kept], self.severity, self.samples[kept])


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of the stream that is reported as one result.

    `indices` has one row (number of the domain in the plan, sample number) per image, in order of arrival.
    With `reset_before` the model is reset to the source model before the first batch. `visit` counts earlier visits.
    """

    name: str
    indices: IntArray  # [n, 2]
    reset_before: bool
    severity: int | None = None
    visit: int = 0

    def __len__(self) -> int:
        return len(self.indices)


def batches(segment: Segment, batch_size: int, drop_last: bool = False) -> Iterator[IntArray]:
    """Cut the segment into batches of index rows [b, 2]; the short last one is kept unless `drop_last`."""
    size = whole_number("batch_size", batch_size, least=1)
    end = len(segment) - len(segment) % size if drop_last else len(segment)
    return (segment.indices[start : start + size] for start in range(0, end, size))


def _integers(what: str, values: npt.ArrayLike) -> IntArray:
    """Copy `values` into a read-only vector of integers."""
    vector = np.array(values)
    if vector.ndim != 1 or vector.size == 0 or not np.issubdtype(vector.dtype, np.integer):
        raise SettingError(f"{what} must be a non-empty vector of integers, got shape {vector.shape} of {vector.dtype}")
    vector = vector.astype(np.int64)
    vector.setflags(write=False)
    return vector


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
