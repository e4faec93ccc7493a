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
    """Samples 0, 1, 2 ... that share one shift: a domain, or a corruption at one severity.

    The labels only order the stream; they are never passed to a method.
    """

    def __init__(self, name: str, labels: npt.ArrayLike, severity: int | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise SettingError(f"the name of a domain must be a non-empty string, got {name!r}")
        found = np.asarray(labels)
        if found.ndim != 1 or found.size == 0 or not np.issubdtype(found.dtype, np.integer):
            raise SettingError(
                f"labels of domain {name!r} must be a non-empty vector of integers, got shape {found.shape} of "
                f"{found.dtype}"
            )
        self.severity = None if severity is None else whole_number(f"severity of domain {name!r}", severity, least=0)
        self.name, self.labels = name, found.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def title(self) -> str:
        """The name together with the severity, as in `fog@5`."""
        return self.name if self.severity is None else f"{self.name}@{self.severity}"


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of the stream that is reported as one result."""

    name: str
    indices: IntArray  # [n, 2]: number of the domain in the plan and sample number, in order of arrival
    reset_before: bool  # whether the model is reset to the source model before the first batch
    severity: int | None = None
    visit: int = 0  # how often the segment came before

    def __len__(self) -> int:
        return len(self.indices)


def batches(segment: Segment, batch_size: int) -> Iterator[IntArray]:
    """Cut the segment into batches of index rows [b, 2]; the last one may be short."""
    size = whole_number("batch_size", batch_size, least=1)
    return (segment.indices[start : start + size] for start in range(0, len(segment), size))


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
    seed = seed_hash(int(trial_seed), int(domain_index))  # NumPy's numbers are printed with their type
    positions = np.arange(size, dtype=np.int64)
    np.random.RandomState(seed).shuffle(positions)
    held_out = int(size * holdout)
    return Split(inside=positions[held_out:], outside=positions[:held_out])
