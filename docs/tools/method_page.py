"""One method as a page: its record, its docstring, its settings, and what was measured."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

from dpl.cli.list import record
from dpl.core.errors import SettingError
from dpl.methods import get_method
from dpl.methods.base import Method
from dpl.methods.settings import GradientSettings
from tools.records import Row, Trace

__all__ = ["index_table", "method_page"]

Kind = type[Method[Any]]

_NORMS = {
    "running": "the source's, not updated (`running`)",
    "batch": "each batch's own (`batch`)",
    "track": "each batch's own, which also move the running ones (`track`)",
    "auto": "chosen from the stream (`auto`)",
}
_SCOPES = {
    "affine": 'scale and shift of the normalisation layers (`scope="affine"`)',
    "classifier": 'the classifier (`scope="classifier"`)',
    "features": 'everything but the classifier (`scope="features"`)',
    "all": 'all parameters (`scope="all"`)',
    "-": "",
}
_SOURCES = {"never": "not needed", "once": "once, before the first batch", "always": "at every step"}
# Why there is no trace of the authors' code; the page says so instead of staying silent.
_UNTRACED = {
    "swr_nsp": "no public code; built from its paper's description",
    "rdumb": "no trace; equal to `eta` with a reset, which is tested",
    "arcface": "no trace; the formula is tested against a slow twin",
    "proxy_nca": "no trace; the formula is tested against a slow twin",
}
_NO_CODE = "no public code; each equation is tested against a slow twin"


def method_page(kind: Kind, traces: Sequence[Trace], measured: Sequence[Row]) -> str:
    """Return the page of a method as Markdown."""
    title, *body = _paragraphs(sys.modules[kind.__module__].__doc__ or "")
    parts = [
        f"# `{kind.info.name}`",
        _prose(title),
        _facts(kind, traces),
        "## Use\n\n" + _use(kind),
        "## What it does\n\n" + "\n\n".join(_block(paragraph) for paragraph in body),
        "## Settings\n\n" + _settings(kind),
        _measured(kind.info.name, measured),
        f"[All methods](../methods.md). This page is made from `{_file(kind)}` by `docs/generate.py`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index_table(kinds: Sequence[Kind]) -> str:
    """Return the table of all methods, each linked to its page."""
    lines = [
        "| method | trains | norm | output | cost per batch | needs | published |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        r = record(kind)
        needs = ", ".join(r["needs"]) or "-"
        name = f"[`{r['name']}`](methods/{r['name']}.md)"
        cells = (name, r["trains"], r["norm"], r["output"], r["passes"], needs, _published(r["paper"]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _published(paper: str) -> str:
    """Return venue and year, the last part of the reference that has a year."""
    parts = [part for part in re.sub(r"\s*\(.*\)", "", paper).split(", ") if re.search(r"\d{4}$", part)]
    return parts[-1] if parts else "-"


def _facts(kind: Kind, traces: Sequence[Trace]) -> str:
    info, r = kind.info, record(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind.settings_class)}
    rows = [
        ("Paper", info.paper),
        ("Changes", info.updates),
        ("Trains, by default", _SCOPES[r["trains"]]),
        ("BatchNorm statistics, by default", _NORMS.get(str(r["norm"]), f"a blend with {r['norm']} of the batch's")),
        ("Answer, by default", f"from {r['output']} the update" if "output" in defaults else ""),
        ("Cost for each batch", info.passes),
        ("Source data", _SOURCES[info.source]),
        ("Smallest batch that adapts", str(info.min_batch)),
        ("Other needs", ", ".join(need for need in r["needs"] if not need.startswith(("source", "batch"))) or "none"),
        ("Optimizer and learning rate", f"{defaults['optimizer']}, {defaults['lr']:g}" if "lr" in defaults else ""),
        ("Checked against the authors' code", _checked(info.name, traces)),
        ("With the DPL loss added", _composed(info.name)),
    ]
    return "\n".join(
        ["| at a glance | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows if value)]
    )


def _checked(name: str, traces: Sequence[Trace]) -> str:
    own = [trace for trace in traces if trace.method == name]
    if not own and "this library" in get_method(name).info.paper:
        return "a method of this library; there is no other code"
    if not own:
        family = name == "dpl" or name.startswith("dpl_")
        return _NO_CODE if family else _UNTRACED.get(name, "no trace of the authors' code was made")
    worst = max(trace.logits for trace in own)
    origins = ", ".join(sorted({trace.whose.split(" (")[0] for trace in own}))
    count = f"{len(own)} trace{'s' if len(own) > 1 else ''}"
    differ = f"largest difference of a logit {worst:.0e} (float64)" if worst else "equal to the bit (float64)"
    return f"{count} of {origins}; {differ}"


def _composed(name: str) -> str:
    try:
        get_method(f"{name}+dpl")
    except SettingError:
        return "no"
    return f"yes: `{name}+dpl`"


def _use(kind: Kind) -> str:
    name, needs_source = kind.info.name, kind.info.source != "never"
    extra = ", source=source_loader" if needs_source else ""
    code = [
        "```python",
        "import dpl",
        "",
        f'model = dpl.adapt(network, "{name}"{extra})',
        "logits = model(images)",
        "```",
    ]
    if needs_source:
        return "\n".join(
            [*code, "", "`source_loader` yields (images, labels) of the source; a pair of tensors will do."]
        )
    command = f"dpl adapt --method {name} --model resnet50 --weights mine.pth --images photos/"
    return "\n".join([*code, "", "```", command, "```"])


def _settings(kind: Kind) -> str:
    """Return the method's own settings, then those that many methods have."""
    shared = {field.name for field in dataclasses.fields(GradientSettings)}
    everything = dataclasses.fields(kind.settings_class)
    own = _table([field for field in everything if field.name not in shared])
    common = _table([field for field in everything if field.name in shared])
    return f"{own}\n\nThose that other methods have too, with the defaults of this one:\n\n{common}" if own else common


def _table(chosen: "Sequence[dataclasses.Field[Any]]") -> str:
    lines = ["| setting | default | valid | meaning |", "|---|---|---|---|"]
    for field in chosen:
        default, meaning = field.default, field.metadata["help"]
        shown = getattr(default, "__name__", "a function") if callable(default) else repr(default)
        lines.append(f"| `{field.name}` | `{shown}` | {_cell(_valid(field))} | {_cell(meaning)} |")
    return "\n".join(lines) if chosen else ""


def _valid(field: "dataclasses.Field[Any]") -> str:
    low, high, choices = (field.metadata[key] for key in ("low", "high", "choices"))
    if choices is not None:
        return ", ".join(f"`{choice!r}`" for choice in choices)
    if low is not None or high is not None:
        whole = "whole, " if isinstance(field.default, int) else ""
        ends = f"{low:g} to {high:g}" if None not in (low, high) else f"≥ {low:g}" if high is None else f"≤ {high:g}"
        return whole + ends
    return "`True`, `False`" if isinstance(field.default, bool) else "see meaning"


def _measured(name: str, measured: Sequence[Row]) -> str:
    wanted = [row for row in measured if re.fullmatch(rf"{re.escape(name)}( \(.*\)|\+dpl)?", row.label)]
    if not wanted:
        return ""
    reference = [row for row in measured if row.label == "source" and name != "source"]
    header = "| method | norm | PACS sketch % | time | CIFAR-10 Gaussian noise % | time |\n|---|---|---|---|---|---|"
    lines = [f"| {row.label} | {row.norm} | {' | '.join(row.figures)} |" for row in [*wanted, *reference]]
    about = "One seed on short streams, time relative to the source: [how this was run](../results/all_methods.md)."
    return "\n".join(["## Measured here", "", header, *lines, "", about])


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text.strip()) if part.strip()]


def _block(paragraph: str) -> str:
    """Return formulas (indented) as a code block, sentences as sentences."""
    lines = paragraph.splitlines()
    if all(line.startswith("    ") for line in lines):
        return "\n".join(["```text", *(line[4:] for line in lines), "```"])
    return re.sub(r" ?\b(Updates|Needs|Output|Departures?)\b(?=[^.:]*:)", r"\n\n**\1**", _prose(paragraph)).strip()


def _prose(text: str) -> str:
    """Join lines, and keep Markdown from reading signs of the formulas as its own."""
    joined = " ".join(line.strip() for line in text.splitlines())
    pieces = re.split(r"(`[^`]*`)", joined)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*_<>|])", r"\\\1", piece) for piece in pieces)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _file(kind: Kind) -> str:
    return f"src/{kind.__module__.replace('.', '/')}.py"
