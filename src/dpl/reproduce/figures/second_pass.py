"""A drawing of how samples with unconfident pseudo-labels are used: two passes, one loss."""

from typing import Any

from dpl.core.extras import optional

__all__ = ["draw_second_pass"]

_CONFIDENT, _UNCONFIDENT, _PLAIN, _LOSS = "#b2182b", "#0072b2", "#555555", "#009e73"
_HEIGHT = 0.9


def draw_second_pass(axis: Any) -> None:
    """Draw both passes into an axis: boxes from left to right, the lent style as a dashed arrow."""
    axis.set(xlim=(0, 16), ylim=(0, 6.4), xticks=[], yticks=[])
    axis.grid(False)
    axis.spines[:].set_visible(False)
    _first_pass(axis)
    _second_pass(axis)
    _loss(axis)


def _first_pass(axis: Any) -> None:
    axis.text(0.1, 5.95, "first pass: who is confident?", fontsize=10, color=_PLAIN)
    _box(axis, 0.1, 4.4, 1.7, "batch")
    _box(axis, 2.4, 4.4, 1.7, "stage 1")
    _box(axis, 4.7, 4.4, 2.3, "rest of the network")
    _box(axis, 7.6, 4.4, 2.2, "softmax > $\\alpha$?")
    for start, end in ((1.8, 2.4), (4.1, 4.7), (7.0, 7.6)):
        _arrow(axis, (start, 4.85), (end, 4.85))
    _box(axis, 10.6, 5.05, 2.4, "confident  $x^a$", _CONFIDENT)
    _box(axis, 10.6, 3.75, 2.4, "unconfident  $x^b$", _UNCONFIDENT)
    _arrow(axis, (9.8, 4.95), (10.6, 5.5), _CONFIDENT)
    _arrow(axis, (9.8, 4.75), (10.6, 4.2), _UNCONFIDENT)


def _second_pass(axis: Any) -> None:
    axis.text(0.1, 3.15, "second pass: $x^a$ in the style of a random $x^b$", fontsize=10, color=_PLAIN)
    _box(axis, 0.1, 1.6, 1.7, "$x^a$", _CONFIDENT)
    _box(axis, 2.4, 1.6, 1.7, "stage 1")
    _box(axis, 5.2, 1.6, 4.1, r"$\hat F^a=\sigma(F^b)\,\dfrac{F^a-\mu(F^a)}{\sigma(F^a)}+\mu(F^b)$", _UNCONFIDENT)
    _box(axis, 10.2, 1.6, 2.4, "rest of the network")
    _arrow(axis, (1.8, 2.05), (2.4, 2.05))
    _arrow(axis, (4.1, 2.05), (5.2, 2.05), label="$F^a$")
    _arrow(axis, (9.3, 2.05), (10.2, 2.05), label=r"$\hat F^a$")
    _arrow(axis, (10.9, 3.75), (8.4, 2.5), _UNCONFIDENT, "--")
    axis.text(10.1, 3.05, r"$\mu(F^b),\ \sigma(F^b)$", fontsize=9, color=_UNCONFIDENT)


def _loss(axis: Any) -> None:
    _box(axis, 13.5, 2.75, 2.3, "DPL loss\nlabels of $x^a$", _LOSS, height=1.3)
    _arrow(axis, (13.0, 5.3), (14.5, 4.05), _CONFIDENT, label="$z^a$")
    _arrow(axis, (12.6, 2.15), (13.9, 2.75), _UNCONFIDENT, label=r"$\hat z^a$")
    axis.text(
        0.1, 0.45, "Predictions come from the first pass; the loss sees every confident image twice, "
        "in its own style and in a lent one.", fontsize=9, color=_PLAIN,
    )  # fmt: skip


def _box(axis: Any, x: float, y: float, width: float, text: str, colour: str = _PLAIN, height: float = _HEIGHT) -> None:
    look = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "facecolor": "white", "edgecolor": colour}
    box = {"x": x + width / 2, "y": y + height / 2}
    axis.text(**box, s=text, ha="center", va="center", fontsize=9, zorder=3)
    patch = optional("matplotlib.patches", "bench").FancyBboxPatch((x, y), width, height, linewidth=1.5, **look)
    axis.add_patch(patch)


def _arrow(
    axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str = _PLAIN, line: str = "-",
    label: str = "",
) -> None:  # fmt: skip
    look = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.5, "linestyle": line}
    axis.annotate("", xy=end, xytext=start, arrowprops=look, zorder=2)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12)
    axis.text(*middle, label, ha="center", va="bottom", fontsize=9, color=colour)
