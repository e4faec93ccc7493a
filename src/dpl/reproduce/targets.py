"""What `dpl reproduce` is asked for, what comes back, and the tables and figures by name.

A new table or figure is a module in `_MODULES` that registers itself.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from dpl.bench import BenchContext, Cell, Store, run_cells
from dpl.bench.engine import OnProgress
from dpl.bench.section import SHIPPED
from dpl.core.errors import SettingError, did_you_mean
from dpl.core.extras import optional
from dpl.reproduce.document import Document, Item, differences, protocol_items, setting_items, version_lines
from dpl.reproduce.layouts import Layout, Row

__all__ = [
    "Engine", "Request", "Result", "Target", "Watch", "experiment_file", "find_target", "register", "targets",
]  # fmt: skip

_QUICK_CAUTION = (
    "Made with --quick, a few batches of each stream and no search: it shows that everything runs, and its figures "
    "mean nothing. Adaptation needs longer streams to tell methods apart."
)

Watch = Callable[[str, Sequence[Cell], Store], AbstractContextManager[OnProgress]]
"""Shows the progress of a run, given a title, the cells and the results folder."""
Engine = Callable[[Sequence[Cell], Store, BenchContext, OnProgress], dict[str, str]]
"""Runs cells and returns the errors by the unit's key."""


@contextmanager
def _silent(title: str, cells: Sequence[Cell], store: Store) -> Iterator[OnProgress]:
    yield lambda event: None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Where the files are, how much is run, and where progress is shown."""

    data: Path
    weights: Path
    out: Path
    """Folder for tables and figures."""
    store: Path
    """Folder of measured results; runs resume there."""
    config: Path | None = None
    """Experiment file; None: the one that belongs to the target."""
    limit: int | None = None
    seeds: int | None = None
    """How many seeds; None: those of the experiment file."""
    quick: bool = False
    run: bool = True
    """False: only what the store has is shown."""
    engine: Engine = run_cells
    """What runs the cells."""
    watch: Watch = _silent
    say: Callable[[str], None] = lambda text: None
    """Takes a line on the progress of training."""
    command: str = ""

    @property
    def caution(self) -> str:
        """The sentence that warns of figures from a quick run."""
        return _QUICK_CAUTION if self.quick else ""

    def document(
        self, name: str, title: str, rows: Sequence[Row], layout: Layout, missing: Sequence[Item], **more: Any
    ) -> Document:
        """Return the document of measured rows: a pure function of them and of the request."""
        return Document(
            name=name,
            title=title,
            caution=self.caution,
            differences=differences(rows, layout),
            missing=self.anonymous_items(missing),
            protocol=protocol_items(rows),
            settings=setting_items(rows),
            versions=version_lines(rows),
            command=self.anonymous(self.command),
            **more,
        )

    def anonymous(self, text: str) -> str:
        """Return a text without this machine's folders: what is written may be handed on."""
        folders = {"DATA": self.data, "WEIGHTS": self.weights, "STORE": self.store, "OUT": self.out}
        if self.config is not None:
            folders["CONFIG"] = self.config.parent
        absolute = {name: str(path) for name, path in folders.items() if path.is_absolute() and len(path.parts) > 1}
        for name, path in sorted(absolute.items(), key=lambda entry: -len(entry[1])):  # inner folders first
            text = re.sub(rf"{re.escape(path)}(?![\w-])", name, text)
        return text

    def anonymous_items(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return entries without this machine's folders."""
        return tuple(Item(item.subject, self.anonymous(item.text), self.anonymous(item.drawing)) for item in items)


@dataclass(frozen=True)
class Result:
    """What was written, and which runs failed and why."""

    files: tuple[Path, ...]
    document: Document | None = None
    failed: dict[str, str] = field(default_factory=dict)
    missing: tuple[Item, ...] = ()
    """As in the document, with the folders of this machine."""


_MODULES = ("dpl.reproduce.tables", "dpl.reproduce.supervised", "dpl.reproduce.figures", "dpl.reproduce.embeddings")

Make = Callable[[Request], Result]


@dataclass(frozen=True)
class Target:
    """A table or figure of the paper: its name, what it shows, and what makes it."""

    name: str
    purpose: str
    make: Make


_registered: dict[str, Target] = {}


def register(name: str, purpose: str, make: Make) -> None:
    """Add a target."""
    _registered[name] = Target(name, purpose, make)


def targets() -> dict[str, Target]:
    """Return every target by its name."""
    for library in ("pandas", "jinja2"):
        optional(library, "bench")
    for module in _MODULES:
        import_module(module)
    return dict(_registered)


def find_target(name: str) -> Target:
    """Return the target of that name, or raise an error that names the nearest."""
    known = targets()
    if name not in known:
        raise SettingError(f"{name!r} is no table or figure that can be reproduced. {did_you_mean(name, known)}")
    return known[name]


def experiment_file(name: str, given: Path | None) -> Path:
    """Return the experiment file that was asked for, or the one that belongs to a target."""
    if given is not None:
        return given
    place = SHIPPED / f"{name}.yaml"
    if place.is_file():
        return place
    raise SettingError(f"no experiment file {name}.yaml in {SHIPPED}; name one with --config FILE")
