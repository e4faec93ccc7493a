"""The page: one HTML file that loads nothing from elsewhere. The template escapes everything that comes from data."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import dpl
from dpl.core.extras import optional
from dpl.report import summary
from dpl.report.chart_data import chart_data, line_styles
from dpl.report.runs import Experiment, Run
from dpl.report.samples import MOST_PICTURES, choose_samples
from dpl.report.summary import shown, signed

__all__ = ["render"]


def render(runs: Sequence[Run], title: str) -> str:
    """Return the whole page."""
    script = _asset("charts.js") + _asset("page.js")
    count = sum(len(run.experiments) for run in runs)
    room = max(40, MOST_PICTURES // max(count, 1))
    page: str = _template().render(
        title=title,
        runs=[(run, [_view(experiment, room) for experiment in run.experiments]) for run in runs],
        policy=_policy(script),
        style=_asset("page.css"),
        script=script,
        version=dpl.__version__,
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return page


def _asset(name: str) -> str:
    return files("dpl.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return the page's content security policy: it may run its own script and load nothing."""
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{checksum}'"


def _template() -> Any:
    jinja2 = optional("jinja2", "bench")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"shown": shown, "figure": lambda value: f"{shown(value):.1f}", "signed": signed}
    environment.filters |= {"number": _number, "known": lambda value: -1 if value != value else value}
    return environment.from_string(_asset("page.html.j2"))


def _number(value: float, digits: int = 0) -> str:
    """Return a figure as text, a dash for one that is not known (NaN)."""
    return "–" if value != value else f"{value:,.{digits}f}"


def _view(experiment: Experiment, room: int) -> dict[str, Any]:
    """Return what the template shows of an experiment."""
    table = summary.accuracy_table(experiment) if experiment.labelled else None
    samples = choose_samples(experiment, room)
    pictures = {"pictures": samples.pictures, "names": samples.names, "shown": samples.shown}
    ranked = _ranked(experiment, table)
    chosen = _compared_first(experiment, ranked)
    return {
        "experiment": experiment,
        "table": table,
        "unlabelled": summary.unlabelled_headline(experiment) if table is None else (),
        "chosen": chosen,
        "styles": line_styles(experiment),
        "drawn": _drawn_first(experiment, ranked, chosen),
        "samples": samples,
        "costs": summary.costs(experiment),
        "findings": summary.findings(experiment),
        "skipped": summary.skipped_updates(experiment),
        "data": chart_data(experiment) | {"samples": pictures},
    }


def _ranked(experiment: Experiment, table: summary.AccuracyTable | None) -> list[str]:
    """Return the methods by accuracy, the best first."""
    scores = {} if table is None else table.scores.dropna().to_dict()
    return sorted(experiment.methods, key=lambda method: -scores.get(method, 0.0))


def _compared_first(experiment: Experiment, ranked: Sequence[str]) -> str:
    """Return the method that is compared with the source model at first: DPL, or else the best."""
    others = [method for method in ranked if method != experiment.reference]
    return next((method for method in ("dpl", "dpl_dagger", *others) if method in others), ranked[0])


def _drawn_first(experiment: Experiment, ranked: Sequence[str], chosen: str) -> list[str]:
    """Return the methods whose lines are drawn at first: few enough to tell apart."""
    wanted = dict.fromkeys([experiment.reference, chosen, "dpl", "dpl_dagger", "pl", "tent", *ranked])
    return [method for method in wanted if method in experiment.methods][:7]
