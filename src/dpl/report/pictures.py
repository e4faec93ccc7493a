"""The parts of a page that the script fills with pictures: controls, legends, and named places to draw in."""

from collections.abc import Sequence

from dpl.report.beside import AccuracyTable
from dpl.report.digest import digest_methods
from dpl.report.model import Experiment
from dpl.report.parts import card, text
from dpl.report.samples import Samples

__all__ = ["compare_part", "default_method", "lines_part", "pictures_part", "stream_part"]

_FAMILIAR = ("dpl", "dpl_dagger", "pl", "tent")
_FIRST_SHOWN = 7


def default_method(experiment: Experiment, table: AccuracyTable | None) -> str:
    """Return the method that is compared with the source at first: DPL, or else the best."""
    others = [method for method in experiment.methods if method != experiment.reference]
    for name in ("dpl", "dpl_dagger"):
        if name in others:
            return name
    return max(others, key=lambda method: _score(table, method), default=experiment.methods[0])


def _score(table: AccuracyTable | None, method: str) -> float:
    found = None if table is None else table.measured.get((method, table.columns[-1]))
    return -1.0 if found is None else found.value


def _first_shown(experiment: Experiment, table: AccuracyTable | None, chosen: str) -> set[str]:
    """Return the methods whose lines are drawn at first: few enough to tell apart."""
    ranked = sorted(experiment.methods, key=lambda method: -_score(table, method))
    wanted = [experiment.reference, chosen, *_FAMILIAR, *ranked]
    present = [method for method in dict.fromkeys(wanted) if method in experiment.methods]
    return {method for method in present[:_FIRST_SHOWN] if method is not None}


def stream_part(experiment: Experiment, chosen: str) -> str:
    """Return the controls that stay in sight: which stream, which method."""
    streams = _select("Stream", "stream", experiment.streams, experiment.streams[0])
    methods = _select("Method", "method", experiment.methods, chosen)
    return f'<div class="controls" role="group" aria-label="What the pictures below show">{streams}{methods}</div>'


def _select(label: str, part: str, names: Sequence[str], chosen: str) -> str:
    options = "".join(
        f'<option value="{number}"{" selected" if name == chosen else ""}>{text(name)}</option>'
        for number, name in enumerate(names)
    )
    return f'<label>{label} <select data-part="{part}">{options}</select></label>'


def lines_part(experiment: Experiment, table: AccuracyTable | None, chosen: str) -> str:
    """Return the places of the lines over the stream, and their legend."""
    figures = []
    if experiment.labelled:
        figures.append(
            _figure("Cumulative accuracy %", "accuracy", "of all images so far; bands: range over seeds", "wide")
        )
    figures.append(_figure("Confidence %", "confidence", "mean over a window of the stream"))
    if experiment.reference is not None and len(experiment.methods) > 1:
        figures.append(_figure("Same answer as the source %", "agreement", "share of a window of the stream"))
    legend = _legend(experiment, _first_shown(experiment, table, chosen))
    title = 'Over the stream <span data-name="stream"></span>'
    return card(title, legend, f'<div class="grid">{"".join(figures)}</div>')


def _legend(experiment: Experiment, shown: set[str]) -> str:
    labels = "".join(
        f'<label style="--c: {look["colour"]}"><input type="checkbox"{" checked" if look["name"] in shown else ""}>'
        f'<svg viewBox="0 0 24 10" aria-hidden="true"><line class="line" x1="0" y1="5" x2="24" y2="5" '
        f'stroke-dasharray="{look["dash"]}"/></svg>{text(look["name"])}</label>'
        for look in digest_methods(experiment)
    )
    buttons = (
        ' <button type="button" class="plain" data-show="all">show all</button> '
        '<button type="button" class="plain" data-show="few">a few</button>'
        if len(experiment.methods) > len(shown)
        else ""
    )
    return f'<fieldset class="legend"><legend>Lines{buttons}</legend>{labels}</fieldset>'


def _figure(title: str, part: str, below: str = "", kind: str = "") -> str:
    small = f"<small>{text(below)}</small>" if below else ""
    place = f'<div class="chart" data-part="{part}"></div>'
    return f'<figure class="{kind}"><figcaption>{title}{small}</figcaption>{place}</figure>'


def compare_part(experiment: Experiment) -> str:
    """Return the places of everything that sets one method against the source."""
    method, stream = '<span data-name="method"></span>', '<span data-name="stream"></span>'
    parts = []
    if experiment.labelled:
        pair = _figure("By domain", "domains", "ring: source, dot: adapted") + _figure(
            "By class", "classes", "of the stream; of many classes those that changed most"
        )
        parts.append(card(f"Accuracy of {method} by domain and class", f'<div class="grid">{pair}</div>'))
        tables = "".join(
            f'<div class="scroll" tabindex="0" role="region" aria-label="Confusion of the {who}" '
            f'data-part="confusion-{part}"></div>'
            for who, part in (("source", "source"), ("adapted model", "method"))
        )
        parts.append(card(f"Confusion of source and {method} on {stream}", f'<div class="grid">{tables}</div>'))
    panels = "".join(
        _figure(title, f"balance-{part}")
        for title, part in (("True classes", "truth"), ("Source", "source"), (f"{method}", "method"))
    )
    parts.append(
        card(
            f"Balance of classes over {stream}, %",
            '<p class="faint">Share of each class among the answers; in a collapse one colour takes over.</p>',
            '<div class="key" data-part="balance-key"></div>',
            f'<div class="grid three">{panels}</div>',
        )
    )
    return "\n".join(parts)


def pictures_part(samples: Samples) -> str:
    """Return the place of the pictures, or why there are none."""
    reason = f'<p class="faint">Images: {text(samples.reason)}.</p>' if samples.reason else ""
    if not samples.pictures and not reason:
        reason = '<p class="faint">There is no image on which adaptation changed the answer.</p>'
    place = '<div data-part="pictures"></div>' if samples.pictures else ""
    title = 'Images on which <span data-name="method"></span> and the source differ'
    return card(title, reason, place)
