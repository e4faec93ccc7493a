"""Figure 3: (a) styles of source domains and of confident and unconfident target images; (b) the second pass."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.bench import BenchContext, Unit
from dpl.reproduce.figures.embed import frame, nearest_distance, standardised, subset, tsne
from dpl.reproduce.figures.inside import Arrays, kept, look_at_styles
from dpl.reproduce.figures.lines import NAMES
from dpl.reproduce.figures.second_pass import draw_second_pass
from dpl.reproduce.figures.sheet import Numbers, Picture, finished, footer, image_context, need_rows, publish
from dpl.reproduce.gather import Gathered, gather
from dpl.reproduce.request import Request, Result
from dpl.reproduce.style import axes
from dpl.reproduce.targets import experiment_file, register

__all__ = ["TITLE", "Styles", "draw", "farther", "make_figure3"]

TITLE = "Figure 3: styles at the first stage, and the second pass of DPL"
_CLAIM = (
    "the styles of confident target images lie near those of the source domains, the styles of unconfident ones lie "
    "apart from them."
)
_CONFIDENCE = 0.9
_MOST_SOURCE, _MOST_TARGET = 200, 600
_SOURCE_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#999933")
_TARGET = {"confident": ("#b2182b", "^"), "unconfident": ("#0072b2", "x")}


@dataclass(frozen=True)
class Styles:
    """Styles around one target domain: of each source domain, and of the target with its confidences."""

    target: str
    sources: Mapping[str, NDArray[np.float32]]
    styles: NDArray[np.float32]
    confident: NDArray[np.bool_]

    def groups(self) -> list[str]:
        """Return what each row of `points` is."""
        names = [name for name, styles in self.sources.items() for _ in styles]
        return names + ["confident" if sure else "unconfident" for sure in self.confident]

    def points(self) -> NDArray[np.float32]:
        """Return all styles, each dimension on one scale."""
        return standardised(np.concatenate([*self.sources.values(), self.styles]))

    def distances(self) -> dict[str, NDArray[np.float64]]:
        """Return how far confident and unconfident target images are from their nearest source styles."""
        points = self.points()
        start = len(points) - len(self.styles)
        far = nearest_distance(points[start:], points[:start])
        return {"confident": far[self.confident], "unconfident": far[~self.confident]}


def make_figure3(request: Request) -> Result:
    """Run the source model over target and source images and draw; what was looked at before is kept."""
    path = experiment_file("fig1", request.config)
    gathered = gather(path, request, ("source",))
    rows = need_rows("fig3", gathered, request)
    context = image_context(path, request) if request.run else None
    units = {unit.domains[0]: unit for _, unit in reversed(finished(gathered))}  # the first seed of each target
    found = [styles for unit in reversed(units.values()) if (styles := _styles(unit, context, request)) is not None]
    picture = _picture(found, _note(gathered, rows, found))
    return publish("fig3", TITLE, _CLAIM, picture, gathered, request)


def _note(gathered: Gathered, rows: Any, found: list[Styles]) -> str:
    text = footer(gathered, rows).partition("; ")[0]
    shown = f"at most {_MOST_TARGET} target images and {_MOST_SOURCE} held out of each source domain are shown"
    return f"{text}; {shown}" if found else f"{text}; styles were not looked at: run without --no-run"


def _styles(unit: Unit, context: BenchContext | None, request: Request) -> Styles | None:
    """Return the styles around one target, None where they are not kept and nothing may be run."""

    def look(at: Unit) -> Arrays | None:
        make = None if context is None else partial(look_at_styles, at, context)
        return kept(request.store / "figures", at, "styles", make)

    held_out = {
        name: look(replace(unit, domains=(name,), part="outside", limit=_MOST_SOURCE)) for name in unit.trained_on
    }
    target = look(unit)
    sources = {name: arrays["style"] for name, arrays in held_out.items() if arrays is not None}
    if target is None or len(sources) < len(held_out):
        return None
    chosen = subset(len(target["style"]), _MOST_TARGET)
    return Styles(unit.domains[0], sources, target["style"][chosen], target["confidence"][chosen] > _CONFIDENCE)


def farther(distances: Mapping[str, NDArray[np.float64]]) -> float | None:
    """Return in percent how often an unconfident image lies farther from the source than a confident one."""
    if not all(map(len, distances.values())):
        return None
    return float(100.0 * (distances["unconfident"][:, None] > distances["confident"]).mean())


def draw(found: list[Styles], note: str = "") -> Any:
    """Draw a cloud of styles for each target above the drawing of the second pass."""
    columns = max(len(found), 1)
    figure, grid = axes(2, columns, width=9.6, height=7.4)
    names = sorted({name for styles in found for name in styles.sources})
    colours = {name: _SOURCE_COLOURS[place % len(_SOURCE_COLOURS)] for place, name in enumerate(names)}
    for number, axis in enumerate(grid[0]):
        _cloud(axis, found[number] if found else None, colours)
    grid[0][0].annotate("(a)", (0, 1.05), xycoords="axes fraction", fontweight="bold")
    place = grid[1][0].get_gridspec()
    for axis in grid[1]:
        axis.remove()
    drawing = figure.add_subplot(place[1, :])
    draw_second_pass(drawing)
    drawing.annotate("(b)", (0, 1.0), xycoords="axes fraction", fontweight="bold")
    figure.supxlabel(note, fontsize=8, color="#555555")
    return figure


def _cloud(axis: Any, styles: Styles | None, colours: Mapping[str, str]) -> None:
    frame(axis, there=styles is not None)
    if styles is None:
        return
    places, groups = tsne(styles.points()), np.array(styles.groups())
    looks = {name: (colours[name], "o") for name in styles.sources} | _TARGET
    for name, (shade, marker) in looks.items():
        chosen = groups == name
        word = f"{name} target" if name in _TARGET else NAMES.get(name, name)
        axis.scatter(
            *places[chosen].T, s=14 if name in _TARGET else 10, marker=marker, color=shade, rasterized=True,
            alpha=0.9 if name in _TARGET else 0.6, linewidths=0.9 if marker == "x" else 0,
            label=f"{word} ({int(chosen.sum())})",
        )  # fmt: skip
    axis.set_title(f"target: {NAMES.get(styles.target, styles.target)}")
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=2, frameon=False, fontsize=8.5, markerscale=1.6)


def _picture(found: list[Styles], note: str) -> Picture:
    rows, data = [], {}
    for styles in found:
        distances = styles.distances()
        medians = [f"{np.median(d):.2f} ({len(d)})" if len(d) else "– (0)" for d in distances.values()]
        share = farther(distances)
        rows.append((styles.target, *medians, "–" if share is None else f"{share:.0f} %"))
        data[styles.target] = {name: far.tolist() for name, far in distances.items()}
    headers = ("target", "confident: distance to source styles (images)", "unconfident", "unconfident one is farther")
    told = "; ".join(f"{row[0]}: unconfident farther in {row[3]} of pairs" for row in rows)
    alt = f"t-SNE of style statistics, and a drawing of the two passes. {told}"
    return Picture(draw(found, note), alt, Numbers(headers, tuple(rows)), data)


register("fig3", "styles of source and target images (t-SNE), and the second pass drawn", make_figure3)
