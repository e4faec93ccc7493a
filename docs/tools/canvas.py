"""A drawing board for the pictures of the documentation: one palette, one way to save, light and dark in one file."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

__all__ = ["CARD", "CLASSES", "INK", "MUTED", "PULL", "PUSH", "SOFT", "arrow", "board", "box", "save", "write"]

Point = tuple[float, float]

# Okabe and Ito's palette: told apart by colour-blind readers. Every class also has a marker of its own.
INK, MUTED, SOFT, CARD = "#1b1f24", "#5b6471", "#d5dae0", "#fefefe"
CLASSES = {"cat": ("#0072b2", "o"), "dog": ("#d55e00", "s"), "bird": ("#009e73", "^")}
PULL, PUSH = "#0171b1", "#d45f01"

# In dark surroundings the file changes its own colours, card included, so it is readable on any page.
_DARK = {
    INK: "#e8eaed", MUTED: "#a9b1bb", SOFT: "#454c55", CARD: "#22262c", "#0072b2": "#5ab4e8", "#d55e00": "#f5924e",
    "#009e73": "#3cc79c", PULL: "#5bb5e9", PUSH: "#f6934f",
}  # fmt: skip
_STYLE: dict[str, Any] = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": CARD,
    "axes.facecolor": "none",
    "savefig.facecolor": CARD,
    "svg.hashsalt": "dpl",  # the same picture is the same file
}


def board(columns: int, width: float, height: float, *, drawing: bool = True) -> tuple[Any, list[Any]]:
    """Return a figure with `columns` panels side by side; without axes where it is a drawing and not a diagram."""
    plt.style.use(_STYLE)
    figure, grid = plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in grid.flat:
        axis.spines[["top", "right"]].set_visible(False)
        if drawing:
            axis.set_axis_off()
    return figure, list(grid.flat)


def box(axis: Any, centre: Point, size: tuple[float, float], text: str, colour: str = MUTED) -> None:
    """Draw a rounded box with a text in it."""
    corner = (centre[0] - size[0] / 2, centre[1] - size[1] / 2)
    shape = "round,pad=0,rounding_size=0.12"
    axis.add_patch(FancyBboxPatch(corner, *size, boxstyle=shape, facecolor=CARD, edgecolor=colour, linewidth=1.6))
    axis.text(*centre, text, ha="center", va="center", fontsize=10.5, linespacing=1.25)


def arrow(
    axis: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = MUTED,
    width: float = 1.6,
    **more: Any,
) -> None:
    """Draw an arrow."""
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9 + 2 * width, "shrinkA": 3, "shrinkB": 3} | more
    axis.add_patch(FancyArrowPatch(start, end, color=colour, linewidth=width, **style))


def save(figure: Any, path: Path, alt: str) -> str:
    """Return the figure as SVG with its description inside and both colour schemes."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": path.stem, "Description": alt})
    plt.close(figure)
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark}!important}}[style*="stroke: {light}"]{{stroke:{dark}!important}}'
        for light, dark in _DARK.items()
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(r"(<svg[^>]*>)", rf"\1\n {style}", text.getvalue(), count=1)


def write(figure: Any, path: Path, alt: str) -> None:
    """Write the figure as SVG; a path that ends in .png gives a picture to look at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        figure.savefig(path, dpi=110)
        plt.close(figure)
    else:
        path.write_text(save(figure, path, alt))
