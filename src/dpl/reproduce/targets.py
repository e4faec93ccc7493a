"""What `dpl reproduce` is asked for, what comes back, and what makes each table and figure."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dpl.bench import BenchContext, Cell, Store, run_cells
from dpl.bench.engine import OnProgress
from dpl.bench.section import SHIPPED
from dpl.core.errors import SettingError, did_you_mean
from dpl.core.extras import optional
from dpl.reproduce.document import Document, Item, differences, protocol_items, setting_items, version_lines
from dpl.reproduce.layouts import Layout, Row

__all__ = ["Request", "Result", "Target", "experiment_file", "find_target"]

_QUICK = (
    "Made with --quick, a few batches of each stream and no search: it shows that everything runs, and its figures "
    "mean nothing."
)
_ONE_BATCH = (
    "One batch shows nothing about the methods, because each predicts a batch before it adapts to it; longer streams "
    "tell them apart."
)

Watch = Callable[[str, Sequence[Cell], Store], AbstractContextManager[OnProgress]]
Engine = Callable[[Sequence[Cell], Store, BenchContext, OnProgress], dict[str, str]]


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
    """Runs cells and returns the errors by the unit's key."""
    watch: Watch = lambda title, cells, store: nullcontext(lambda event: None)
    """Shows the progress of a run."""
    say: Callable[[str], None] = lambda text: None
    """Takes a line on the progress of training."""
    command: str = ""

    def document(
        self, name: str, title: str, rows: Sequence[Row], layout: Layout, missing: Sequence[Item], **more: Any
    ) -> Document:
        """Return the document of measured rows: a pure function of them and of the request."""
        if "protocol" not in more:
            more |= {"protocol": protocol_items(rows), "settings": setting_items(rows), "versions": version_lines(rows)}
        return Document(
            name=name,
            title=title,
            caution=self._caution(rows),
            differences=differences(rows, layout),
            missing=tuple(Item(i.subject, self.anonymous(i.text), self.anonymous(i.drawing)) for i in missing),
            command=self.anonymous(self.command),
            **more,
        )

    def _caution(self, rows: Sequence[Row]) -> str:
        """Return the sentences above figures that must not be taken seriously."""
        short = self.quick or any(row["n"] <= row.get("batch_size", 0) for row in rows)
        return " ".join([*([_QUICK] if self.quick else []), *([_ONE_BATCH] if short else [])])

    def anonymous(self, text: str) -> str:
        """Return a text without this machine's folders: what is written may be handed on."""
        folders = {"DATA": self.data, "WEIGHTS": self.weights, "STORE": self.store, "OUT": self.out}
        if self.config is not None:
            folders["CONFIG"] = self.config.parent
        absolute = {name: str(path) for name, path in folders.items() if path.is_absolute() and len(path.parts) > 1}
        for name, path in sorted(absolute.items(), key=lambda entry: -len(entry[1])):  # inner folders first
            text = re.sub(rf"{re.escape(path)}(?![\w-])", name, text)
        return text


@dataclass(frozen=True)
class Result:
    """What was written, and which runs failed and why."""

    files: tuple[Path, ...]
    document: Document | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[Item, ...] = ()
    """As in the document, with the folders of this machine."""


class Target(NamedTuple):
    """A table or figure of the paper: its name, and what makes it."""

    name: str
    make: Callable[[Request], Result]


def find_target(name: str) -> Target:
    """Return the target of that name, or raise an error that names the nearest."""
    for library in ("pandas", "jinja2"):
        optional(library, "bench")
    from dpl.reproduce import embeddings, figures, paper, supervised, tables  # these need the libraries, and this file

    makers: dict[str, Callable[[Request], Result]] = {
        **{table: partial(tables.make_table, table) for table in paper.tables()},
        "supervised": supervised.make_supervised,
        "fig1": figures.make_figure1,
        "fig2": embeddings.make_figure2,
        "fig3": embeddings.make_figure3,
        "fig4": figures.make_figure4,
        "fig5": figures.make_figure5,
    }
    if name not in makers:
        raise SettingError(f"{name!r} is no table or figure that can be reproduced. {did_you_mean(name, makers)}")
    return Target(name, makers[name])


def experiment_file(name: str, given: Path | None) -> Path:
    """Return the experiment file that was asked for, or the one that belongs to a target."""
    path = given or SHIPPED / f"{name}.yaml"
    if given is None and not path.is_file():
        raise SettingError(f"no experiment file {name}.yaml in {SHIPPED}; name one with --config FILE")
    return path
