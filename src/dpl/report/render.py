"""A page of runs: one HTML file that asks nobody for anything. What comes from data is escaped, always."""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

import dpl
from dpl.report.beside import accuracy_table
from dpl.report.digest import digest
from dpl.report.model import Experiment, Run
from dpl.report.parts import accuracy_part, cost_part, facts_part, health_part, text, tiles
from dpl.report.pictures import compare_part, default_method, lines_part, pictures_part, stream_part
from dpl.report.samples import MOST, Samples, choose_samples
from dpl.reproduce.document import Item

__all__ = ["render"]

_HERE = "dpl.report"


def render(runs: Sequence[Run], title: str) -> str:
    """Return the whole page."""
    script = _asset("charts.js") + _asset("page.js")
    body = [_header(runs, title), '<main id="content">']
    count = sum(len(run.experiments) for run in runs)
    number = 0
    for place, run in enumerate(runs):
        body.append(_run_head(run, place, len(runs)))
        for experiment in run.experiments:
            body.append(_experiment(experiment, number, max(40, MOST // max(count, 1))))
            number += 1
    body += ["</main>", _footer()]
    return "\n".join([_head(title, script), *body, f"<script>{script}</script>", "</body>", "</html>", ""])


def _asset(name: str) -> str:
    return files(_HERE).joinpath(name).read_text(encoding="utf-8")


def _head(title: str, script: str) -> str:
    """Return the head; the policy lets the page run its own script and load nothing."""
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{text(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>"
    )


def _header(runs: Sequence[Run], title: str) -> str:
    links = []
    number = 0
    for run in runs:
        for experiment in run.experiments:
            links.append(f'<li><a href="#experiment-{number}">{text(experiment.title)}</a></li>')
            number += 1
    contents = f'<nav aria-label="Experiments"><ul>{"".join(links)}</ul></nav>' if len(links) > 1 else ""
    return (
        f'<a class="skip" href="#content">Skip to the content</a>\n<header>\n<h1>{text(title)}</h1>\n'
        '<p class="faint">Every image is predicted when it arrives, before the model adapts to it.</p>\n'
        f"{contents}\n</header>"
    )


def _run_head(run: Run, place: int, count: int) -> str:
    """Return a run's name, how far it came, and what is wrong with it."""
    kind = "good" if run.whole else "bad"
    name = f'<h2 id="run-{place}">{text(run.name)}</h2>' if count > 1 else ""
    badge = f'<p><span class="badge {kind}">{text(run.status)}</span> <span class="faint">{text(run.kind)}</span></p>'
    return "\n".join([name, badge, _problems(run.problems), "" if run.experiments else _nothing(run)])


def _problems(problems: Sequence[Item]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li><strong>{text(item.subject)}</strong>: {text(item.text)}</li>" for item in problems)
    many = f"{len(problems)} {'thing is' if len(problems) == 1 else 'things are'} missing or damaged"
    return f'<details class="card problems" open><summary>{many}</summary><ul>{items}</ul></details>'


def _nothing(run: Run) -> str:
    """Return what is said of a run without figures."""
    return (
        '<div class="card"><p>There is no finished result in this run yet, so there is nothing to draw.</p>'
        f'<p class="faint">{text(run.kind)}: {text(run.status)}.</p></div>'
    )


def _experiment(experiment: Experiment, number: int, room: int) -> str:
    table = accuracy_table(experiment) if experiment.labelled else None
    samples = choose_samples(experiment, room)
    chosen = default_method(experiment, table)
    parts: Iterable[str] = [
        f'<article class="experiment" id="experiment-{number}" aria-labelledby="title-{number}">',
        f'<h3 id="title-{number}">{text(experiment.title)}</h3>',
        tiles(experiment, table),
        facts_part(experiment, table),
        accuracy_part(experiment, table) if table is not None else "",
        stream_part(experiment, chosen),
        lines_part(experiment, table, chosen),
        compare_part(experiment),
        pictures_part(samples),
        cost_part(experiment),
        health_part(experiment),
        _data(experiment, samples),
        "</article>",
    ]
    return "\n".join(part for part in parts if part)


def _data(experiment: Experiment, samples: Samples) -> str:
    """Return what the script draws; no text in it can end the element that holds it."""
    content: dict[str, Any] = digest(experiment) | {
        "samples": {"pictures": samples.pictures, "names": samples.names, "shown": samples.shown}
    }
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False)
    safe = plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json">{safe}</script>'


def _footer() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"<footer><p>Written by dpl {escape(dpl.__version__)} on {now}. This file needs no other and asks no server "
        "for anything.</p><noscript><p>The pictures need JavaScript; the tables do not.</p></noscript></footer>"
    )
