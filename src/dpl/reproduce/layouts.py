"""Where a measured stream belongs in each table of the paper, and of how many streams a cell is the mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpl.bench.images import CLEAN, CORRUPTED, DOMAINS
from dpl.data.facts import CORRUPTIONS
from dpl.data.sets import normalise_name

__all__ = ["FIGURES", "LAYOUTS", "Layout", "Row", "network_name"]

Row = Mapping[str, Any]
"""One finished segment as `dpl.bench.cell_rows` returns it."""

_PAPER_SEEDS = 3
_BACKBONES = {"resnet18": "resnet18", "vit_base_patch16": "vit_b16", "mixer_b16": "mixer_b16"}


@dataclass(frozen=True)
class Layout:
    """How one table is laid out."""

    place: Callable[[Row], tuple[str, str] | None]
    """Returns column and stream of a measured row, None for a row that the table has no place for."""
    streams: int = 1
    """Streams whose mean is one figure."""
    open_rows: bool = True
    """Whether methods that the paper's table lacks are shown too."""
    networks: Mapping[str, str] | None = None
    """The paper's network by the beginning of the column's name."""
    selected: bool = False
    """Whether the paper chose settings on source validation."""
    seeds: int | None = _PAPER_SEEDS
    """Seeds behind the paper's figures; None where it does not say."""


def network_name(network: str) -> str:
    """Return a network's name without where it comes from and which weights it had."""
    return network.removeprefix("torchvision/").split(".")[0]


def _by_dataset(row: Row) -> tuple[str, str] | None:
    """One column per data set, the mean over its target domains."""
    return (normalise_name(row["dataset"]), row["domains"][0]) if row["dataset"] in DOMAINS else None


def _by_pair(row: Row) -> tuple[str, str] | None:
    return (row["column"], row["column"]) if row["dataset"] == "domainnet126" and "->" in row["column"] else None


def _corruption(row: Row) -> tuple[str, str, int] | None:
    """Return data set, corruption and severity of one of the usual fifteen, on disk or regenerated."""
    regenerated = row["dataset"] in CLEAN and row["corrupt"] is not None
    if not (regenerated or row["dataset"] in CORRUPTED) or row["severity"] is None:
        return None
    name = row["domains"][0]
    dataset = f"{row['dataset']}_c" if regenerated else row["dataset"]
    return (dataset, name, row["severity"]) if name in CORRUPTIONS else None


def _by_corruption(row: Row) -> tuple[str, str] | None:
    found = _corruption(row)
    return (found[1], found[1]) if found and found[0] == "imagenet_c" and found[2] == 5 else None


def _by_severity(row: Row) -> tuple[str, str] | None:
    found = _corruption(row)
    return (f"{found[0]}/{found[2]}", found[1]) if found else None


def _by_backbone(row: Row) -> tuple[str, str] | None:
    name = network_name(row["network"])
    for beginning, backbone in _BACKBONES.items():
        if row["dataset"] == "pacs" and name.startswith(beginning):
            return f"{backbone}/{row['domains'][0]}", row["domains"][0]
    return None


_GENERALISATION = Layout(_by_dataset, streams=4, networks={"": "resnet50"}, selected=True)
_ABLATION = replace(_GENERALISATION, open_rows=False)

LAYOUTS: Mapping[str, Layout] = {
    "table1": _GENERALISATION,
    "table2": Layout(_by_pair, networks={"": "domainnet126_resnet50"}),
    "table3": Layout(_by_corruption, networks={"": "resnet50"}),
    "table4": Layout(
        _by_severity,
        streams=len(CORRUPTIONS),
        networks={"cifar10_c": "wrn28_10", "cifar100_c": "resnext29", "imagenet_c": "resnet50"},
    ),
    "table5": _ABLATION,
    "table6": Layout(_by_backbone, selected=True),
    "table7": _ABLATION,
    "table8": _ABLATION,
    "supervised": Layout(
        lambda row: (row["dataset"], row["dataset"]), open_rows=False, networks={"": "resnet50"}, seeds=None
    ),
}
"""By the table's name."""

FIGURES = Layout(lambda row: (row["dataset"], row["domains"][0]), networks={"": "resnet50"})
"""Of every figure: a value for each stream, measured with the same network."""
