"""Domains of labelled samples, and the segments of sample numbers that make up a stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpl.core.errors import SettingError
from dpl.core.settings import whole_number

__all__ = ["Domain", "IntArray", "Segment", "batches"]

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, init=False, eq=False)
class Domain:
    """Samples that share one shift: a domain, or a corruption at one severity.

    `samples` are the numbers of the samples in the data set, by default 0, 1, 2 ... The labels only order the stream;
    they are never passed to a method.
    """

    name: str
    labels: IntArray
    severity: int | None
    samples: IntArray

    def __init__(
        self,
        name: str,
        labels: npt.ArrayLike,
        severity: int | None = None,
        samples: npt.ArrayLike | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise SettingError(f"the name of a domain must be a non-empty string, got {name!r}")
        classes = _integers(f"labels of domain {name!r}", labels)
        numbers = _integers(f"samples of domain {name!r}", range(len(classes)) if samples is None else samples)
        if not len(classes) == len(numbers) == len(np.unique(numbers)):
            raise SettingError(
                f"samples of domain {name!r}: expected {len(classes)} different numbers, one for each label"
            )
        level = None if severity is None else whole_number(f"severity of domain {name!r}", severity, least=0)
        for field, value in (("name", name), ("labels", classes), ("severity", level), ("samples", numbers)):
            object.__setattr__(self, field, value)

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
