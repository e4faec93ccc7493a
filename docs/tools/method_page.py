"""One method as a page: its facts, equation, own settings, differences from other code, and what was measured."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

from dpl.cli.list import record
from dpl.methods import get_method
from dpl.methods.base import Method
from dpl.methods.settings import GradientSettings
from tools.docstring import Docstring, read_docstring
from tools.markdown import escaped, render, wrapped
from tools.records import RecordedRun, Row
from tools.settings_table import HEADERS, shown, table_rows

__all__ = ["method_page", "methods_page"]

Kind = type[Method[Any]]

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Default": ("One set of settings for all streams ([soft DPL](dpl-soft.md)).", ("dpl_soft",)),
    "No training": (
        "No gradient step; they change statistics, templates or predictions.",
        ("source", "norm", "t3a", "lame"),
    ),
    "Entropy": (
        "Make predictions more certain, most of them by training the normalisation layers.",
        (
            "tent",
            "tent_prebn",
            "cpl",
            "eta",
            "eata",
            "rdumb",
            "sar",
            "deyo",
            "come",
            "delta",
            "poem",
            "memo",
            "roid",
            "cmf",
            "shot_im",
            "domainadaptor",
        ),
    ),
    "Pseudo-label and prototype": (
        "Train on the model's own labels, or pull features towards class prototypes.",
        ("pl", "rpl", "shot", "dpl_o", "dpl_star", "dpl", "dpl_dagger", "proxy_nca", "arcface", "tsd", "swr_nsp"),
    ),
    "Teacher": (
        "Train towards the predictions of another network: a moving average of the model, or the source.",
        ("cotta", "rmt", "santa", "adacontrast"),
    ),
    "Source statistics": (
        "Bring the statistics of features back to those of the source.",
        ("actmad", "foa"),
    ),
    "Memory bank": (
        "Collect samples of the stream and train on them, or classify by them.",
        ("note", "sotta", "rotta", "petta", "tast", "tast_bn"),
    ),
}
_NORMS = {
    "running": "from training, not updated (`running`)",
    "batch": "of each batch (`batch`)",
    "track": "of each batch; they also update the running statistics (`track`)",
    "renorm": "moving averages over the stream (`renorm`)",
    "auto": "a share by the effective batch size (`auto`)",
}
_NO_RUN = {
    "swr_nsp": "no public code exists; written from the paper",
    "rdumb": "no recorded run; tested to equal `eta` with a reset",
}
_PLAIN_RUN = "no recorded run; the equations are tested against a direct implementation"
_SHARED = {field.name for field in dataclasses.fields(GradientSettings)}
_IN_FACTS = {"norm", "optimizer", "lr", "output"}  # shared settings whose default is among the facts


def method_page(kind: Kind, runs: Sequence[RecordedRun], measured: Sequence[Row]) -> str:
    """Return the page of a method as Markdown."""
    about = read_docstring(sys.modules[kind.__module__].__doc__ or kind.info.name)
    fields = dataclasses.fields(kind.settings_class)
    own = table_rows(kind.settings_class, [field.name for field in fields if field.name not in _SHARED])
    return render(
        "method.md.jinja",
        name=kind.info.name,
        title=escaped(about.name),
        purpose=wrapped(escaped(_sentence(about.purpose or kind.info.updates))),
        paper=wrapped(escaped(kind.info.paper)),
        facts=_facts(kind, runs),
        blocks=_blocks(about, kind.info.paper),
        notes=_notes(about),
        departures=wrapped(escaped(_sentence(about.parts.get("departures", "")))),
        headers=HEADERS,
        settings=own,
        changed=_changed(kind),
        measured=_measured(kind.info.name, measured),
        file=f"src/{kind.__module__.replace('.', '/')}.py",
    )


def methods_page(kinds: Sequence[Kind]) -> str:
    """Return the overview: every method in its group, linked to its page."""
    records = {kind.info.name: record(kind) for kind in kinds}
    groups = [(title, about, [_index_row(records[name]) for name in names]) for title, (about, names) in GROUPS.items()]
    listed = {name for _, names in GROUPS.values() for name in names}
    if missing := sorted(records.keys() - listed):
        raise ValueError(f"no group for {', '.join(missing)}: add them to GROUPS in docs/tools/method_page.py")
    return render("methods.md.jinja", groups=groups, count=len(records), added=_added_settings())


def _added_settings() -> list[str]:
    plain, added = (dataclasses.fields(get_method(name).settings_class) for name in ("tent", "tent+dpl"))
    return [field.name for field in added if field.name not in {field.name for field in plain}]


def _index_row(about: dict[str, Any]) -> list[str]:
    needs = ", ".join(about["needs"]) or "-"
    name = f"[`{about['name']}`](methods/{about['name']}.md)"
    return [name, about["trains"], str(about["norm"]), about["passes"], needs, _published(about["paper"])]


def _published(paper: str) -> str:
    """Return venue and year, the last part of the reference that has a year."""
    parts = [part for part in re.sub(r"\s*\(.*\)", "", paper).split(", ") if re.search(r"\d{4}$", part)]
    return parts[-1] if parts else "-"


def _facts(kind: Kind, runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    info, about = kind.info, record(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind.settings_class)}
    optimizer = f"`{defaults['optimizer']}`, learning rate {defaults['lr']:g}" if "lr" in defaults else "none"
    return [
        ("Updates", info.updates),
        ("BatchNorm statistics", _NORMS.get(str(about["norm"]), f"interpolated, weight {about['norm']} for the batch")),
        ("Prediction returned", f"from {about['output']} the update"),
        ("Cost per batch", info.passes),
        ("Needs", ", ".join(about["needs"]) or "nothing"),
        ("Optimizer", optimizer),
        ("Checked against", _checked(info.name, runs)),
    ]


def _checked(name: str, runs: Sequence[RecordedRun]) -> str:
    own = [run for run in runs if run.method == name]
    if not own and "this library" in get_method(name).info.paper:
        return "a method of this library; no other code exists"
    if not own and (name == "dpl" or name.startswith("dpl_")):
        return "no public code exists; each equation is tested against a direct implementation"
    if not own:
        return _NO_RUN.get(name, _PLAIN_RUN)
    worst = max(run.logits for run in own)
    origins = ", ".join(sorted({run.code.split(" (")[0] for run in own}))
    count = f"{len(own)} recorded run{'s' if len(own) > 1 else ''}"
    differ = f"logits within {worst:.0e} (float64)" if worst else "identical logits (float64)"
    return f"{count} of {origins}; {differ}"


def _blocks(about: Docstring, paper: str) -> list[tuple[str, str]]:
    """Return explanations and equations in order, without the reference that the page names already."""
    blocks = []
    for kind, text in about.blocks:
        if kind == "equation":
            blocks.append((kind, re.sub(r" {3,}(?=\([^()]*\)$)", "   ", text, flags=re.MULTILINE)))
        elif rest := _without_reference(text, paper):
            blocks.append((kind, wrapped(escaped(rest))))
    return blocks


def _without_reference(text: str, paper: str) -> str:
    return text[len(paper) :].lstrip(".; ") if text.startswith(paper) else text


def _notes(about: Docstring) -> list[str]:
    """Return what the docstring adds to the facts about updates, needs and output."""
    long = {"updates": 12, "needs": 6, "output": 5}  # words; shorter ones repeat the table
    found = [(part, about.parts.get(part, "")) for part in long]
    notes = [f"- {part.capitalize()}: {text}" for part, text in found if len(text.split()) > long[part]]
    return [wrapped(escaped(note), indent="  ") for note in notes]


def _changed(kind: Kind) -> str:
    """Return shared settings whose default is another one here and not among the facts."""
    usual = {field.name: field.default for field in dataclasses.fields(GradientSettings)}
    fields = [field for field in dataclasses.fields(kind.settings_class) if field.name in _SHARED - _IN_FACTS]
    return ", ".join(f"`{field.name}={shown(field.default)}`" for field in fields if field.default != usual[field.name])


def _measured(name: str, measured: Sequence[Row]) -> list[list[str]]:
    wanted = [row for row in measured if re.fullmatch(rf"{re.escape(name)}( \(.*\)|\+dpl)?", row.label)]
    reference = [row for row in measured if row.label == "source" and name != "source"]
    return [[row.label, *row.figures] for row in [*wanted, *reference]] if wanted else []


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
