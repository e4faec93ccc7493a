"""Which method and settings suit a set of images? The automatic choice, asked for its reasons and drawn."""

from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from dpl.model.adaptive import adapt
from dpl.auto import Auto, Recommendation
from dpl.core.errors import DataError
from dpl.methods.base import Source

__all__ = ["draw", "recommend"]

_WIDTH, _ROW, _LEFT = 760, 26, 190  # pixels
Row = tuple[str, float | None, bool]  # label, value (None: a heading), whether it was chosen
_INK, _BAR, _CHOSEN, _GRID = "#1c1c1c", "#b9c6d3", "#2f6f9f", "#d9d9d9"


def recommend(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    calibrate: Source | tuple[Tensor, Tensor] | None = None,
    classifier: str | None = None,
) -> Recommendation:
    """Let the automatic choice meet batches of images, and return what it chose and why; `model` is not changed."""
    adaptive = adapt(model, calibrate=calibrate, classifier=classifier)
    seen = 0
    for images in batches:
        adaptive(images)
        seen += len(images)
    if not seen:
        raise DataError("batches: there was no image to choose by; pass at least one batch")
    if not isinstance(adaptive.method, Auto):
        raise TypeError("the default method is no longer the automatic choice")
    return adaptive.method.recommendation()


def draw(recommendation: Recommendation, path: str | Path) -> Path:
    """Draw what the choice was made by as a PNG: information by share of batch statistics, answers won by candidate."""
    share = float(recommendation.settings.get("norm", 0.0))
    won = {name: -100 * regret for name, regret in recommendation.regret.items()}
    rows: list[Row] = [("Information of the answers, nats, by the batch's share in BatchNorm statistics", None, False)]
    rows += [(f"share {at:g}", nats, at == share) for at, nats in recommendation.information.items()]
    rows += [("Answers won by learning on batches not yet seen, % (estimated)", None, False)]
    best = max(won, key=lambda name: won[name]) if won and "scope" in recommendation.settings else None
    rows += [(name, gain, name == best) for name, gain in won.items()] or [("not tried", 0.0, False)]
    rows += [(line, None, False) for line in (recommendation.call, *recommendation.why)]
    image = Image.new("RGB", (_WIDTH, _ROW * (len(rows) + 1)), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    largest = [max((abs(v) for _, v, _ in part if v is not None), default=1.0) or 1.0 for part in _panels(rows)]
    panel = -1
    for number, (label, value, chosen) in enumerate(rows):
        panel += value is None
        _draw_row(canvas, font, number, label, value, chosen, largest[min(panel, len(largest) - 1)])
    image.save(path, format="PNG")
    return Path(path)


def _panels(rows: list[Row]) -> list[list[Row]]:
    """Cut the rows at their headings."""
    panels: list[list[Row]] = []
    for row in rows:
        if row[1] is None:
            panels.append([])
        panels[-1].append(row)
    return panels


def _draw_row(
    canvas: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    number: int,
    label: str,
    value: float | None,
    chosen: bool,
    largest: float,
) -> None:
    """Draw a heading (no value) or a bar to the right of the zero line, or to its left below zero."""
    top, zero = _ROW * number + _ROW // 2, _LEFT + 120
    canvas.text((12 if value is None else 28, top), label, fill=_INK, font=font)
    if value is None:
        return
    canvas.line([(zero, top - 4), (zero, top + _ROW - 6)], fill=_GRID)
    end = zero + round((_WIDTH - zero - 90 if value > 0 else 100) * value / largest)
    canvas.rectangle([min(zero, end), top + 1, max(zero, end), top + _ROW - 10], fill=_CHOSEN if chosen else _BAR)
    canvas.text((max(zero, end) + 8, top), f"{value:.2f}{'  chosen' if chosen else ''}", fill=_INK, font=font)
