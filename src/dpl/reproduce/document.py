"""A finished comparison: the grids, and in words what is missing, what differs, and how it was obtained."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dpl.reproduce.grid import Grid

__all__ = ["Document", "Item", "Setup"]


@dataclass(frozen=True)
class Item:
    """One entry of a list: about what, and what is said; `drawing` is text that keeps its line breaks."""

    subject: str
    text: str
    drawing: str = ""

    def lines(self) -> str:
        """Return the entry for a terminal."""
        text = f"- {self.subject}: {self.text}" if self.subject else f"- {self.text}"
        return f"{text}:\n{self.drawing}" if self.drawing else text


@dataclass(frozen=True)
class Setup:
    """How the measured figures were obtained."""

    protocol: tuple[Item, ...] = ()
    """One entry for each section of the experiment."""
    settings: tuple[Item, ...] = ()
    """Every setting of every method."""
    versions: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Document:
    """All that a written table says."""

    name: str
    title: str
    grids: tuple[Grid, ...]
    differences: tuple[str, ...]
    """In what the measurement departs from the paper's."""
    missing: tuple[Item, ...]
    """What the table lacks, why, and what would fill it."""
    paper: tuple[Item, ...]
    """The paper's own protocol."""
    notes: tuple[Item, ...]
    """Remarks on the printed figures."""
    setup: Setup

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
        setup = self.setup
        command = (Item("", "Run it again with", setup.command),) if setup.command else ()
        lists = [
            ("What differs from the paper", _plain(self.differences)),
            ("What is missing", self.missing),
            ("Protocol", setup.protocol),
            ("The paper's protocol", self.paper),
            ("Settings", setup.settings),
            ("Notes on the printed figures", self.notes),
            ("Versions and command", (*_plain([", ".join(setup.versions)] if setup.versions else []), *command)),
        ]
        return [(title, items) for title, items in lists if items]


def _plain(texts: Iterable[str]) -> tuple[Item, ...]:
    return tuple(Item("", text) for text in texts)
