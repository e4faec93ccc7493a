"""Figures of a cell before they are summed up: one value per seed, each the mean over the cell's streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from dpl.core.errors import SettingError
from dpl.reproduce.grid import Measured
from dpl.reproduce.layouts import Layout, Row

__all__ = ["Series", "collect", "mean_of"]

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Series:
    """One value per seed, from `parts` of `expected` streams."""

    values: Mapping[int, float]
    images: int
    parts: int
    expected: int

    def summary(self) -> Measured:
        """Return mean and deviation over the seeds."""
        values = list(self.values.values())
        deviation = stdev(values) if len(values) > 1 else None
        return Measured(fmean(values), deviation, tuple(self.values), self.images, self.parts, self.expected)


def collect(rows: Sequence[Row], layout: Layout, value: Value) -> dict[tuple[str, str], Series]:
    """Return the series of every (method, column) that something was measured for.

    Only seeds that ran on the same streams are averaged: those with most of them, of equals those of the earliest.
    """
    found: dict[tuple[str, str], dict[int, dict[str, Row]]] = {}
    for row in rows:
        place = layout.place(row)
        if place is None or value(row) is None:
            continue
        column, stream = place
        streams = found.setdefault((row["label"], column), {}).setdefault(row["seed"], {})
        _refuse_twice(streams.setdefault(stream, row), row)
    return {key: _series(by_seed, layout.streams, value) for key, by_seed in found.items()}


def _refuse_twice(first: Row, second: Row) -> None:
    """Raise where two experiments would fill the same cell: their mean would be neither's."""
    if first["unit"] != second["unit"]:
        raise SettingError(
            f"{first['label']}: the sections {first['section']!r} and {second['section']!r} both measured "
            f"{second['dataset']}/{second['domains'][0]} with seed {second['seed']}; keep one of them in the "
            "experiment file"
        )


def _series(by_seed: dict[int, dict[str, Row]], expected: int, value: Value) -> Series:
    seeds = sorted(by_seed)
    most = max(seeds, key=lambda seed: (len(by_seed[seed]), -seed))
    streams = by_seed[most].keys()
    values = {seed: fmean(_known(value, by_seed[seed])) for seed in seeds if by_seed[seed].keys() == streams}
    images = sum(row["n"] for row in by_seed[most].values())
    return Series(values, images, len(streams), expected)


def _known(value: Value, streams: dict[str, Any]) -> list[float]:
    return [figure for row in streams.values() if (figure := value(row)) is not None]


def mean_of(members: Sequence[Series | None], expected: int) -> Series | None:
    """Return the average over columns, of those that are there and for the seeds that all of them share."""
    present = [member for member in members if member is not None]
    shared = set.intersection(*(set(member.values) for member in present)) if present else set()
    if not shared:
        return None
    values = {seed: fmean(member.values[seed] for member in present) for seed in sorted(shared)}
    return Series(values, sum(m.images for m in present), sum(m.parts for m in present), expected)
