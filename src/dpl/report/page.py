"""The page: one HTML file that loads nothing from elsewhere. The template escapes everything that comes from data."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

import dpl
from dpl.core.errors import DataError
from dpl.core.files import write_file
from dpl.data.images import EXTENSIONS
from dpl.report import summary
from dpl.report.chart_data import chart_data
from dpl.report.predictions import joined
from dpl.report.runs import Experiment, Run
from dpl.report.samples import Samples
from dpl.report.summary import shown, signed

__all__ = ["write_report"]


def write_report(runs: Sequence[Run], out: Path) -> Path:
    """Write the page of some runs to a file, `report.html` if a folder is named, in the place of an older one."""
    file = out / "report.html" if out.is_dir() else out
    # A picture of the tables stands beside its page.
    others = [path for path in file.parent.glob("*") if not path.with_suffix(".html").is_file()]
    if any(path.suffix.lower() in EXTENSIONS for path in others):
        raise DataError(f"{file}: its folder holds images; name another place for the page with --out FILE")
    shown_runs, script = joined(runs), _asset("charts.js") + _asset("page.js")
    # The page may run its own script and load nothing.
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _TEMPLATES.from_string(_asset("page.html.j2")).render(
        title=shown_runs[0].name if len(shown_runs) == 1 else f"{len(shown_runs)} runs",
        runs=[(run, [_view(experiment) for experiment in run.experiments]) for run in shown_runs],
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{checksum}'",
        style=_asset("page.css"),
        script=script,
        version=dpl.__version__,
        time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return write_file(file, page)


def _asset(name: str) -> str:
    return files("dpl.report").joinpath(name).read_text(encoding="utf-8")


def _view(experiment: Experiment) -> dict[str, Any]:
    """Return what the template shows of an experiment."""
    table = summary.accuracy_table(experiment) if experiment.labelled else None
    samples = Samples(experiment)
    chosen, drawn = _shown_first(experiment, table)
    return {
        "experiment": experiment,
        "table": table,
        "chosen": chosen,
        "drawn": drawn,
        "samples": samples,
        "costs": summary.costs(experiment),
        "findings": summary.findings(experiment),
        "data": chart_data(experiment) | {"pictures": samples.pictures, "shown": samples.shown},
    }


def _shown_first(experiment: Experiment, table: summary.AccuracyTable | None) -> tuple[str, list[str]]:
    """Return the method that is compared with the source model at first, DPL or else the best; and a few to draw."""
    scores = {} if table is None else table.scores.dropna().to_dict()
    ranked = sorted(experiment.methods, key=lambda method: -scores.get(method, 0.0))
    wanted = dict.fromkeys(["dpl", "dpl_dagger", "pl", "tent", *ranked])
    order = [name for name in wanted if name in ranked and name != experiment.reference]
    chosen = next(iter(n for n in ("dpl", "dpl_dagger", *ranked) if n in order), ranked[0])
    return chosen, list(dict.fromkeys([experiment.reference or chosen, chosen, *order]))[:7]


_TEMPLATES = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_TEMPLATES.filters |= {"shown": shown, "figure": lambda value: f"{shown(value):.1f}", "signed": signed}
# A figure that is not known is NaN.
_TEMPLATES.filters["number"] = lambda value, digits=0: "–" if value != value else f"{value:,.{digits}f}"
_TEMPLATES.filters["known"] = lambda value: -1 if value != value else value
