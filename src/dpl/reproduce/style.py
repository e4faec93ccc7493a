"""One look for all figures: colour-blind safe, readable in print, the same colour for the same method everywhere."""

from typing import Any

from dpl.core.extras import optional

__all__ = ["COLOURS", "axes", "colour"]

# Okabe and Ito's palette.
COLOURS = {
    "source": "#7f7f7f",
    "norm": "#999933",
    "pl": "#d55e00",
    "tent": "#0072b2",
    "tsd": "#cc79a7",
    "t3a": "#56b4e9",
    "dpl_o": "#e69f00",
    "dpl_star": "#56b4e9",
    "dpl": "#009e73",
    "dpl_dagger": "#117733",
}
_OTHERS = ("#332288", "#aa4499", "#88ccee", "#882255", "#44aa99", "#661100")


def colour(method: str, index: int = 0) -> str:
    """Return the colour of a method; `index` tells apart those without one of their own."""
    return COLOURS.get(method, _OTHERS[index % len(_OTHERS)])


def axes(rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 4.0) -> tuple[Any, Any]:
    """Return a figure without a window and its axes, in the house style."""
    optional("matplotlib", "bench").use("Agg")
    plt = optional("matplotlib.pyplot", "bench")
    figure, grid = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, grid
