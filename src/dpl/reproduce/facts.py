"""What measured rows say about their origin: protocol, settings, versions, and what differs from the paper."""

from collections.abc import Iterable, Sequence
from typing import Any

from dpl.reproduce.document import Item
from dpl.reproduce.layouts import LAYOUTS, Row, network_name
from dpl.reproduce.paper import Table

__all__ = ["differences", "paper_notes", "protocol_items", "setting_items", "version_lines"]

_PAPER_SEEDS = 3
_HIDDEN_SETTINGS = ("seed",)  # it differs from run to run by design, and stands in the protocol


def protocol_items(rows: Sequence[Row]) -> tuple[Item, ...]:
    """Return an entry for each section: what was streamed, how, to which network."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    return tuple(Item(name, _protocol(members)) for name, members in sections.items())


def _protocol(rows: Sequence[Row]) -> str:
    first = rows[0]
    facts = [
        f"{first['dataset']}, {_listed(row['domains'][0] for row in rows)}",
        f"severity {_listed(row['severity'] for row in rows)}" if first["severity"] is not None else "",
        f"corruptions regenerated from clean images with seed {first['corrupt']}" if first["regenerated"] else "",
        f"the {1 - first['holdout']:.0%} in-split of each domain" if first["part"] == "inside" else "whole domains",
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
    methods: dict[str, list[Row]] = {}
    for row in rows:
        methods.setdefault(row["label"], []).append(row)
    return tuple(Item(label, _settings(members)) for label, members in methods.items())


def _settings(rows: Sequence[Row]) -> str:
    method = rows[0]["method"]
    names = dict.fromkeys(name for row in rows for name in row["settings"] if name not in _HIDDEN_SETTINGS)
    values = [
        f"{name}={_listed((r['settings'].get(name) for r in rows), ' or ')}{_searched(rows, name)}" for name in names
    ]
    outputs = [f"{rows[0]['trainable_values']:,} trained values", f"source images: {rows[0]['source_data']}"]
    return "; ".join([f"method {method}", ", ".join(values), *outputs]) if values else f"method {method}"


def _searched(rows: Sequence[Row], name: str) -> str:
    return " (chosen on source validation)" if any(name in row["chosen"] for row in rows) else ""


def version_lines(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the versions that took part, each with all its values."""
    names = dict.fromkeys(name for row in rows for name in row["versions"])
    return tuple(f"{name} {_listed((row['versions'].get(name) for row in rows), ' or ')}" for name in names)


def differences(table: Table, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return in what the measurement departs from the paper's protocol, as far as the rows tell."""
    seeds = {row["seed"] for row in rows}
    fixed = LAYOUTS[table.name].selected and not any(row["chosen"] for row in rows)
    limits = {row["limit"] for row in rows if row["limit"] is not None}
    found = [
        *_networks(table, rows),
        "Settings were fixed; the paper chose them on source validation." if fixed else "",
        f"At most {_listed(limits)} images of each domain were used." if limits else "",
        f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}; the paper has {_PAPER_SEEDS}."
        if len(seeds) < _PAPER_SEEDS
        else "",
        "Corruptions were regenerated from clean images with the published constants: the random draws are others."
        if any(row["regenerated"] for row in rows)
        else "",
        *dict.fromkeys(note for row in rows for note in row["data_notes"]),
    ]
    return tuple(text for text in found if text)


def _networks(table: Table, rows: Sequence[Row]) -> list[str]:
    """Compare the networks with the paper's; another one makes the figures another experiment's."""
    layout, found = LAYOUTS[table.name], {}
    for row in rows:
        place = layout.place(row)
        for beginning, network in (layout.networks or {}).items():
            if place is not None and place[0].startswith(beginning) and network_name(row["network"]) != network:
                found[row["network"], network] = row["dataset"]
    return [
        f"{dataset}: measured with {ours}, the paper with {theirs}: only the order of methods can be compared, "
        "not the figures."
        for (ours, theirs), dataset in found.items()
    ]


def paper_notes(table: Table) -> tuple[Item, ...]:
    """Return the remarks on rows and on the whole table; those on single cells are footnotes."""
    return tuple(Item(note.row or "", note.text) for note in table.notes if note.column is None)


def _listed(values: Iterable[Any], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(map(str, values)))
