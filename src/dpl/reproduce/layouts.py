"""Where a measured stream belongs in a table of the paper, and of how many streams a cell is the mean.

The layout of each table is data: the entry `layout` of its file in `paper`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpl.bench.images import CLEAN, CORRUPTED, DOMAINS
from dpl.data.facts import CORRUPTIONS
from dpl.data.sets import normalise_name

__all__ = ["PLACES", "Layout", "Row", "network_name"]

Row = Mapping[str, Any]
"""One finished segment as `dpl.bench.cell_rows` returns it."""
Place = Callable[[Row], tuple[str, str] | None]
"""Returns column and stream of a measured row, None for a row that the table has no place for."""

_BACKBONES = {"resnet18": "resnet18", "vit_base_patch16": "vit_b16", "mixer_b16": "mixer_b16"}


@dataclass(frozen=True)
class Layout:
    """How one table is laid out."""

    place: Place
    streams: int = 1
    """Streams whose mean is one figure."""
    open_rows: bool = True
    """Whether methods that the paper's table lacks are shown too."""
    networks: Mapping[str, str] = field(default_factory=dict)
    """The paper's network by the beginning of the column's name."""
    selected: bool = False
    """Whether the paper chose settings on source validation."""
    seeds: int | None = 3
    """Seeds behind the paper's figures; None where it does not say."""


def network_name(network: str) -> str:
    """Return a network's name without where it comes from and which weights it had."""
    return network.removeprefix("torchvision/").split(".")[0]


def _by_dataset(row: Row) -> tuple[str, str] | None:
    """One column per data set, the mean over its target domains."""
    return (normalise_name(row["dataset"]), row["domains"][0]) if row["dataset"] in DOMAINS else None


def _by_pair(row: Row) -> tuple[str, str] | None:
    return (row["column"], row["column"]) if row["dataset"] == "domainnet126" and "->" in row["column"] else None


def _by_severity(row: Row) -> tuple[str, str] | None:
    """One column per data set and severity, the mean over the usual fifteen corruptions, on disk or regenerated."""
    regenerated = row["dataset"] in CLEAN and row["corrupt"] is not None
    corrupted = (regenerated or row["dataset"] in CORRUPTED) and row["severity"] is not None
    if not corrupted or row["domains"][0] not in CORRUPTIONS:
        return None
    return f"{row['dataset']}{'_c' if regenerated else ''}/{row['severity']}", row["domains"][0]


def _by_corruption(row: Row) -> tuple[str, str] | None:
    place = _by_severity(row)
    return (place[1], place[1]) if place and place[0] == "imagenet_c/5" else None


def _by_backbone(row: Row) -> tuple[str, str] | None:
    name = network_name(row["network"])
    backbone = next((ours for beginning, ours in _BACKBONES.items() if name.startswith(beginning)), None)
    domain = row["domains"][0]
    return (f"{backbone}/{domain}", domain) if row["dataset"] == "pacs" and backbone else None


PLACES: Mapping[str, Place] = {
    "dataset": _by_dataset,
    "pair": _by_pair,
    "corruption": _by_corruption,
    "severity": _by_severity,
    "backbone": _by_backbone,
    "set": lambda row: (row["dataset"], row["domains"][0]),
}
"""By the word that a table's file uses."""
