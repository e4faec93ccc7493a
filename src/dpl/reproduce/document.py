"""A finished comparison: its tables, and in words what is missing, what differs from the paper, how it was obtained."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dpl.core.errors import DataError
from dpl.data.folders import LayoutError, shorten
from dpl.reproduce.compare import ComparisonTable
from dpl.reproduce.layouts import Layout, Row, network_name

__all__ = ["Document", "Item", "differences", "grouped", "merged", "protocol_items", "setting_items", "version_lines"]

Key = TypeVar("Key")
Value = TypeVar("Value")
_HIDDEN_SETTINGS = ("seed",)  # it differs from run to run by design, and stands in the protocol


@dataclass(frozen=True)
class Item:
    """One entry of a list: its subject and its text; `drawing` is text that keeps its line breaks."""

    subject: str
    text: str
    drawing: str = ""

    @classmethod
    def of_error(cls, subject: str, error: DataError) -> "Item":
        """Return an error as an entry; the layout that was expected is a drawing."""
        if isinstance(error, LayoutError):
            return cls(subject, f"{error.problem}; expected layout", error.layout)
        return cls(subject, str(error))

    def lines(self) -> str:
        """Return the entry for a terminal."""
        text = f"- {self.subject}: {self.text}" if self.subject else f"- {self.text}"
        return f"{text}:\n{self.drawing}" if self.drawing else text


@dataclass(frozen=True, kw_only=True)
class Document:
    """Everything that a written table or figure says."""

    name: str
    title: str
    caution: str = ""
    """A sentence above everything else, for figures that must not be taken seriously."""
    grids: tuple[ComparisonTable, ...] = ()
    """The table, then the one with the oracle's settings where they were searched; none for a figure."""
    differences: tuple[str, ...] = ()
    """In what the measurement departs from the paper's."""
    missing: tuple[Item, ...] = ()
    """What is not there, why, and what would fill it."""
    paper: tuple[Item, ...] = ()
    """The paper's own protocol."""
    notes: tuple[Item, ...] = ()
    """Remarks on the printed figures."""
    protocol: tuple[Item, ...] = ()
    """How the measured figures were obtained: one entry for each section of the experiment."""
    settings: tuple[Item, ...] = ()
    """Every setting of every method."""
    versions: tuple[str, ...] = ()
    command: str = ""

    def record(self) -> dict[str, Any]:
        """Return the document as plain data."""
        return dataclasses.asdict(self)

    @property
    def legend(self) -> str:
        """What explains the figures."""
        metric = self.grids[0].metric
        better = "higher" if metric == "accuracy" else "lower"
        return (
            f"{metric.capitalize()} in percent, {better} is better: measured above, as printed in the paper below. "
            "Measured figures are mean ± standard deviation over seeds; (3/4) tells how many of the streams (domains, "
            "corruptions) behind the paper's figure were measured. The best and the second best of a column are "
            "marked, among the measured and among the printed figures."
        )

    def sections(self) -> list[tuple[str, tuple[Item, ...]]]:
        """Return the lists below the tables, each under its heading; empty ones are left out."""
        versions = [", ".join(self.versions)] if self.versions else []
        command = [Item("", "Run it again with", self.command)] if self.command else []
        lists = [
            ("What differs from the paper", _plain(self.differences)),
            ("What is missing", self.missing),
            ("Protocol", self.protocol),
            ("The paper's protocol", self.paper),
            ("Settings", self.settings),
            ("Notes on the printed figures", self.notes),
            ("Versions and command", (*_plain(versions), *command)),
        ]
        return [(title, items) for title, items in lists if items]


def _plain(texts: Iterable[str]) -> tuple[Item, ...]:
    return tuple(Item("", text) for text in texts)


def protocol_items(rows: Sequence[Row]) -> tuple[Item, ...]:
    """Return an entry for each section: what was streamed, how, to which network."""
    return tuple(
        Item(name, _protocol(members)) for name, members in grouped((row["section"], row) for row in rows).items()
    )


def _protocol(rows: Sequence[Row]) -> str:
    first = rows[0]
    facts = [
        f"{first['dataset']}, {_listed(row['domains'][0] for row in rows)}",
        f"severity {_listed(row['severity'] for row in rows)}" if first["severity"] is not None else "",
        f"corruptions regenerated from clean images with seed {first['corrupt']}" if first["regenerated"] else "",
        f"the {1 - first['holdout']:.0%} training split of each domain"
        if first["part"] == "inside"
        else "whole domains",
        f"at most {first['limit']:,} images of each" if first["limit"] is not None else "",
        f"protocol {first['protocol']}, order {first['order']}",
        f"batch size {_listed(row['batch_size'] for row in rows)}",
        f"seeds {_listed(row['seed'] for row in rows)}",
        f"network {first['network']}, images {first['transform']}",
        f"weights SHA-256 {_listed(row['weights'][:12] for row in rows)}",
    ]
    return "; ".join(fact for fact in facts if fact)


def setting_items(rows: Sequence[Row]) -> tuple[Item, ...]:
    """Return every setting of every method; `a or b` where it was chosen, or differs between sections."""
    return tuple(
        Item(label, _settings(members)) for label, members in grouped((row["label"], row) for row in rows).items()
    )


def _settings(rows: Sequence[Row]) -> str:
    method = f"method {rows[0]['method']}"
    names = dict.fromkeys(name for row in rows for name in row["settings"] if name not in _HIDDEN_SETTINGS)
    values = [
        f"{name}={_listed((r['settings'].get(name) for r in rows), ' or ')}{_searched(rows, name)}" for name in names
    ]
    outputs = [f"{rows[0]['trainable_values']:,} trained values", f"source images: {rows[0]['source_data']}"]
    return "; ".join([method, ", ".join(values), *outputs]) if values else method


def _searched(rows: Sequence[Row], name: str) -> str:
    return " (chosen on source validation)" if any(name in row["chosen"] for row in rows) else ""


def version_lines(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the versions that took part, each with all its values."""
    names = dict.fromkeys(name for row in rows for name in row["versions"])
    return tuple(f"{name} {_listed((row['versions'].get(name) for row in rows), ' or ')}" for name in names)


def differences(rows: Sequence[Row], layout: Layout) -> tuple[str, ...]:
    """Return in what the measurement departs from the paper's protocol, as far as the rows show it."""
    seeds = len({row["seed"] for row in rows})
    limits = sorted({row["limit"] for row in rows if row["limit"] is not None})
    found = _other_networks(rows, layout)
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


def _other_networks(rows: Sequence[Row], layout: Layout) -> list[str]:
    """Name each network that is not the paper's: its figures belong to another experiment."""
    found = {}
    for row in rows:
        place = layout.place(row)
        for beginning, network in layout.networks.items():
            if place is not None and place[0].startswith(beginning) and network_name(row["network"]) != network:
                found[row["network"], network] = row["dataset"]
    return [
        f"{dataset}: measured with {ours}, the paper with {theirs}: only the order of methods can be compared, "
        "not the figures."
        for (ours, theirs), dataset in found.items()
    ]


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values by their key, both in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def merged(items: Iterable[Item]) -> tuple[Item, ...]:
    """Return entries of the same text as one, with their number."""
    found = grouped(((item.text, item.drawing), item.subject) for item in items)
    return tuple(
        Item(shorten(subjects), f"{text} ({len(subjects)} times)" if len(subjects) > 1 else text, drawing)
        for (text, drawing), subjects in found.items()
    )


def _by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    return grouped((row[key], row) for row in rows)


def _listed(values: Iterable[Any], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(map(str, values)))
