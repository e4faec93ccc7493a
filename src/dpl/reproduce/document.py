"""A finished comparison and how it was obtained: Markdown and LaTeX come from templates, JSON from the fields."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpl.core.files import write_file
from dpl.data.folders import shorten
from dpl.reproduce.compare import ComparisonTable
from dpl.reproduce.paper import Layout, Row, network_name

__all__ = [
    "Document", "Item", "Picture", "differences", "grouped", "how_measured", "latex", "merged", "render", "write",
]  # fmt: skip

Key = TypeVar("Key")
Value = TypeVar("Value")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": "$<$", ">": "$>$", "|": "$|$", '"': "''",
    "±": r"$\pm$", "→": r"$\rightarrow$", "–": "--", "×": r"$\times$",
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One entry of a list: its subject and its text, of which lines after the first keep their breaks and indents."""

    subject: str
    text: str

    def lines(self) -> str:
        """Return the entry for a terminal."""
        return f"- {self.subject}: {self.text}" if self.subject else f"- {self.text}"


@dataclass(frozen=True, kw_only=True)
class Document:
    """Everything that a written table or figure says."""

    name: str
    title: str
    caution: str = ""  # a sentence above everything else, for figures that must not be taken seriously
    grids: tuple[ComparisonTable, ...] = ()  # the table, then the one with the oracle's settings; none for a figure
    differences: tuple[str, ...] = ()  # in what the measurement departs from the paper's
    missing: tuple[Item, ...] = ()  # what is not there, why, and what would fill it
    paper: tuple[Item, ...] = ()  # the paper's own protocol
    notes: tuple[Item, ...] = ()  # remarks on the printed figures
    protocol: tuple[Item, ...] = ()  # how the measured figures were obtained, for each section of the experiment
    settings: tuple[Item, ...] = ()  # every setting of every method
    versions: tuple[str, ...] = ()
    command: str = ""


def how_measured(rows: Sequence[Row]) -> dict[str, tuple[Any, ...]]:
    """Return what a document says of how the rows were obtained."""
    names = dict.fromkeys(name for row in rows for name in row["versions"])
    versions = tuple(f"{name} {_listed((row['versions'].get(name) for row in rows), ' or ')}" for name in names)
    return {"protocol": _protocol(rows), "settings": _settings(rows), "versions": versions}


def _protocol(rows: Sequence[Row]) -> tuple[Item, ...]:
    """Return an entry for each section: what was streamed, how, to which network."""
    items = []
    for name, members in grouped((row["section"], row) for row in rows).items():
        first = members[0]
        part = f"the {1 - first['holdout']:.0%} training split of each domain"
        facts = [
            f"{first['dataset']}, {_listed(row['domains'][0] for row in members)}",
            f"severity {_listed(row['severity'] for row in members)}" if first["severity"] is not None else "",
            f"corruptions regenerated from clean images with seed {first['corrupt']}" if first["regenerated"] else "",
            part if first["part"] == "inside" else "whole domains",
            f"at most {first['limit']:,} images of each" if first["limit"] is not None else "",
            f"protocol {first['protocol']}, order {first['order']}",
            f"batch size {_listed(row['batch_size'] for row in members)}",
            f"seeds {_listed(row['seed'] for row in members)}",
            f"network {first['network']}, images {first['transform']}",
            f"weights SHA-256 {_listed(row['weights'][:12] for row in members)}",
        ]
        items.append(Item(name, "; ".join(filter(None, facts))))
    return tuple(items)


def _settings(rows: Sequence[Row]) -> tuple[Item, ...]:
    """Return every setting of every method; `a or b` where it was chosen, or differs between sections."""
    items = []
    for label, members in grouped((row["label"], row) for row in rows).items():
        first, values = members[0], []
        # The seed differs from run to run by design, and stands in the protocol.
        for name in dict.fromkeys(name for row in members for name in row["settings"] if name != "seed"):
            searched = " (chosen on source validation)" if any(name in row["chosen"] for row in members) else ""
            values.append(f"{name}={_listed((row['settings'].get(name) for row in members), ' or ')}{searched}")
        outputs = f"{first['trainable_values']:,} trained values; source images: {first['source_data']}"
        text = f"method {first['method']}" + (f"; {', '.join(values)}; {outputs}" if values else "")
        items.append(Item(label, text))
    return tuple(items)


def differences(rows: Sequence[Row], layout: Layout) -> tuple[str, ...]:
    """Return in what the measurement departs from the paper's protocol, as far as the rows show it."""
    seeds = len({row["seed"] for row in rows})
    limits = sorted({row["limit"] for row in rows if row["limit"] is not None})
    networks = {(row["network"], layout.network(row)): row["dataset"] for row in rows}
    found = [
        f"{dataset}: measured with {ours}, the paper with {theirs}: only the order of methods can be compared, "
        "not the figures."
        for (ours, theirs), dataset in networks.items()
        if theirs not in (None, network_name(ours))
    ]
    if layout.selected and not any(row["chosen"] for row in rows):
        found.append("Settings were fixed; the paper chose them on source validation.")
    if limits:
        found.append(f"At most {_listed(limits)} images of each domain were used.")
    if layout.seeds is not None and seeds < layout.seeds:
        found.append(f"{seeds} {'seed' if seeds == 1 else 'seeds'}; the paper has {layout.seeds}.")
    if any(row["regenerated"] for row in rows):
        found.append(
            "Corruptions were regenerated from clean images with the published constants: the random draws are others."
        )
    return tuple(dict.fromkeys([*found, *(note for row in rows for note in row["data_notes"])]))


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values by their key, both in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def merged(items: Iterable[Item]) -> tuple[Item, ...]:
    """Return entries of the same text as one, with their number."""
    found = grouped((item.text, item.subject) for item in items)
    times = {text: f" ({len(subjects)} times)" if len(subjects) > 1 else "" for text, subjects in found.items()}
    return tuple(Item(shorten(subjects), text + times[text]) for text, subjects in found.items())


def _listed(values: Iterable[Any], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(map(str, values)))


@dataclass(frozen=True)
class Picture:
    """A drawing, what it shows in words, and the numbers behind it."""

    figure: Any
    alt: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # a small table of what is drawn
    data: Mapping[str, Any]  # every drawn value, unrounded
    claim: str = ""  # what the paper shows in its figure


def render(document: Document, suffix: str, picture: Picture | None = None) -> str:
    """Return the document in the format of a file's suffix; a figure has a page in Markdown and JSON."""
    if suffix == "json":
        shown = {"claim": picture.claim, "alt": picture.alt, "data": dict(picture.data)} if picture else {}
        record = dataclasses.asdict(document) | shown
        return json.dumps(record, indent=1, default=lambda array: array.tolist()) + "\n"
    return _TEMPLATES.get_template(f"table.{suffix}.j2").render(document=document, picture=picture)


def write(document: Document, folder: Path, picture: Picture | None = None) -> tuple[Path, ...]:
    """Write a table as `<name>.md`, `.tex` and `.json` into a folder, the page of a figure as `.md` and `.json`."""
    suffixes = ("md", "json") if picture else ("md", "tex", "json")
    return tuple(write_file(folder / f"{document.name}.{s}", render(document, s, picture)) for s in suffixes)


def latex(text: str) -> str:
    """Return a text that LaTeX shows unchanged."""
    return "".join(_LATEX.get(character, character) for character in text.replace("->", "→"))


def _latex_line(line: str) -> str:
    """Return a line with its indent: spaces at its beginning would vanish."""
    indent = (len(line) - len(line.lstrip())) / 2
    return rf"\hspace*{{{indent:g}em}}\texttt{{{latex(line.strip())}}}"


_TEMPLATES = Environment(
    loader=PackageLoader("dpl.reproduce", "templates"),
    autoescape=False,  # noqa: S701 - no format is HTML; filters escape what Markdown and LaTeX would misread
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    # LaTeX is full of braces.
    variable_start_string="<<", variable_end_string=">>", block_start_string="<%", block_end_string="%>",
    comment_start_string="<#", comment_end_string="#>",
)  # fmt: skip
_TEMPLATES.filters |= {"latex": latex, "latex_line": _latex_line}
_TEMPLATES.filters["markdown"] = lambda text: _MARKDOWN.sub(r"\\\1", text.replace("->", "→"))
