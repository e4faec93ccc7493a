"""What `dpl reproduce` is asked for, and its experiment on this machine: the runs, and what is missing for the rest."""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from dpl.bench import BenchContext, Cell, GridRun, Store, Unit, cell_rows
from dpl.bench.domains import CORRUPTED, FOLDER, known_domains
from dpl.bench.engine import OnProgress
from dpl.bench.grid import section_cells
from dpl.bench.images import check_data
from dpl.bench.section import SHIPPED, Section, read_sections, within
from dpl.bench.store import StoredRequest, chosen, complete, read_requests, write_request
from dpl.core.errors import DataError, SettingError
from dpl.core.extras import choose_device
from dpl.data.folders import LayoutError, shorten
from dpl.reproduce.document import Document, Item, grouped
from dpl.reproduce.paper import Place, Row

__all__ = ["Experiment", "Request", "Result", "problem", "run_experiment"]

Watch = Callable[[str, Sequence[Cell], Store], AbstractContextManager[OnProgress]]
_QUICK_IMAGES, _QUICK_BATCHES = 200, 5  # of each stream, whichever are more: one batch shows every method equal
_QUICK = (
    "Made with --quick, a few batches of each stream and no search: it shows that everything runs, and its figures "
    "mean nothing."
)
_ONE_BATCH = (
    "One batch shows nothing about the methods, because each predicts a batch before it adapts to it; longer streams "
    "tell them apart."
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Where the files are, how much is run, and where progress is shown."""

    data: Path
    weights: Path
    out: Path  # folder for tables and figures
    store: Path  # folder of measured results; runs resume there
    config: Path | None = None  # experiment file; None: the one that belongs to the target
    limit: int | None = None
    seeds: int | None = None  # how many seeds; None: those of the experiment file
    quick: bool = False
    run: bool = True  # false: only what the store has is shown
    watch: Watch = lambda *_: nullcontext(lambda event: None)  # shows the progress of a run
    say: Callable[[str], None] = lambda text: None  # takes a line on the progress of training
    command: str = ""

    def document(self, rows: Sequence[Row], missing: Sequence[Item], **facts: Any) -> Document:
        """Return the document of measured rows: a pure function of them, of the request, and of further `facts`."""
        short = self.quick or any(row["n"] <= row.get("batch_size", 0) for row in rows)
        return Document(
            caution=" ".join(text for text, holds in ((_QUICK, self.quick), (_ONE_BATCH, short)) if holds),
            missing=tuple(Item(item.subject, self.anonymous(item.text)) for item in missing),
            command=self.anonymous(self.command),
            **facts,
        )

    def anonymous(self, text: str) -> str:
        """Return a text without this machine's folders: what is written may be handed on."""
        configs = self.config.parent if self.config else Path()
        folders = {"DATA": self.data, "WEIGHTS": self.weights, "STORE": self.store, "OUT": self.out, "CONFIG": configs}
        absolute = {name: str(path) for name, path in folders.items() if path.is_absolute() and len(path.parts) > 1}
        for name, path in sorted(absolute.items(), key=lambda entry: -len(entry[1])):  # inner folders first
            text = re.sub(rf"{re.escape(path)}(?![\w-])", name, text)
        return text


@dataclass(frozen=True)
class Result:
    """What was written, and which runs failed and why."""

    files: tuple[Path, ...]
    document: Document
    missing: Sequence[Item]  # as in the document, with the folders of this machine
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Experiment:
    """What an experiment file comes to on this machine: what can be run, what was measured, why the rest was not."""

    title: str
    request: Request
    store: Store
    context: BenchContext
    cells: list[Cell] = field(default_factory=list)
    missing: list[Item] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)  # what was measured of the cells

    def finished(self) -> list[tuple[Cell, Unit]]:
        """Return the cells that are done, each with the unit that counts."""
        return [(cell, chosen(cell, self.store).target) for cell in self.cells if complete(cell, self.store)]


def run_experiment(
    name: str, request: Request, only: Collection[str] | None = None, file: str = "", place: Place | None = None
) -> Experiment:
    """Run what the results folder lacks of an experiment file, unless asked not to; return what it has then.

    `only` names the methods that are wanted, None all of them; without any measured row that has a `place` it fails.
    """
    experiment = _plan(request.config or SHIPPED / f"{file or name}.yaml", request, only)
    if not request.run and not experiment.finished() and (stored := _stored_cells(experiment, only)):
        experiment.cells, experiment.missing = stored, []
    experiment.missing += _unfinished(_run(experiment) if request.run else experiment.cells, experiment)
    experiment.rows = [row for row in cell_rows(experiment.cells, experiment.store) if place is None or place(row)]
    if experiment.rows:
        return experiment
    reasons = "".join(f"\n{item.lines()}" for item in experiment.missing)
    if request.run:
        raise DataError(f"{name}: nothing could be run{reasons}")
    raise DataError(
        f"--no-run: {request.store} holds no result of {name} with these settings; leave --no-run out to run it, or "
        f"name the folder of its results with --store{reasons}"
    )


def _stored_cells(experiment: Experiment, only: Collection[str] | None) -> list[Cell]:
    """Return what was asked for under this title when the results were made; neither data nor weights are needed."""
    cells = {  # of several requests for one cell the last counts
        (cell.section, cell.label, cell.source, cell.candidates[0].target.stream_title): cell
        for request in read_requests(experiment.store.root)
        if request.title == experiment.title
        for cell in request.cells
    }
    return [cell for cell in cells.values() if only is None or cell.label in only]


def _plan(path: Path, request: Request, only: Collection[str] | None) -> Experiment:
    """Read an experiment file stream by stream, so that one without weights does not cost the others."""
    title, sections = read_sections(path)
    if only is not None and not any(entry.label in only for section in sections for entry in section.methods):
        raise SettingError(f"{path}: contains none of the requested rows: {', '.join(only)}")
    store = Store(request.store)
    context = BenchContext(request.data, request.weights, path.parent, cache=store.root / "cache")
    plan = Experiment(title, request, store, context)
    for section in sections:
        absent = problem(section.name, _open_data, section, context)
        if absent is not None:
            plan.missing.append(absent)
            if request.run:
                continue
        lacking: dict[str, DataError] = {}
        with within(str(path)):
            found = section_cells(_shortened(section, request), context, lacking)
        plan.cells += [cell for cell in found if only is None or cell.label in only]
        reasons = grouped((str(error), stream) for stream, error in lacking.items())
        if len(reasons) == len(lacking) > 1:  # each lacks a file of its own: the first stands for all
            reasons = {f"{next(iter(reasons))} (for the first of them)": list(lacking)}
        plan.missing += [Item(section.name, f"{shorten(names)}: {reason}") for reason, names in reasons.items()]
    return plan


def _shortened(section: Section, request: Request) -> Section:
    """Return the section with the seeds and images asked for; a quick one has no search."""
    largest = max(entry.batch_size or section.batch_size for entry in section.methods)
    quick = max(_QUICK_IMAGES, _QUICK_BATCHES * largest) if request.quick else None
    limits = [limit for limit in (section.limit, request.limit, quick) if limit is not None]
    wanted = request.seeds or (1 if request.quick else len(section.seeds))
    seeds = islice(chain(section.seeds, count(max(section.seeds) + 1)), wanted)  # the file's, then the next numbers
    section = replace(section, seeds=tuple(seeds), limit=min(limits, default=None))
    return replace(section, selection=None, oracle=False) if request.quick else section


def problem(subject: str, check: Callable[..., object], *arguments: Any, **options: Any) -> Item | None:
    """Return what is wrong if `check` raises an error of the data."""
    try:
        with warnings.catch_warnings():  # in what a data set differs from the published one stands in the document
            warnings.simplefilter("ignore")
            check(*arguments, **options)
    except LayoutError as error:
        return Item(subject, f"{error.problem}; expected layout:\n{error.layout}")
    except DataError as error:
        return Item(subject, str(error))
    return None


def _open_data(section: Section, context: BenchContext) -> None:
    """Open a section's data set, of a corrupted one the first corruption."""
    files = ("images", "classes")
    options: dict[str, Any] = {name: context.find(path) for name in files if (path := getattr(section, name))}
    if section.dataset in CORRUPTED:
        first = (section.domains or known_domains(section.dataset, True))[:1]
        options |= {"domains": first, "severity": section.severities[0]}
    elif section.dataset == FOLDER:
        options["domains"] = section.domains
    context.open(section.dataset, **options)


def _run(experiment: Experiment) -> list[Cell]:
    """Run and return the cells whose images are all here, source images included; note what the others lack."""
    request, context, store = experiment.request, experiment.context, experiment.store
    context.device = str(choose_device())
    by_images = grouped((_images(cell), cell) for cell in experiment.cells)
    problems = {key: problem(own[0].section, check_data, own[0].units(), context) for key, own in by_images.items()}
    by_problem = grouped((problems[_images(cell)], cell) for cell in experiment.cells)
    ready = by_problem.pop(None, [])
    for item, lacking in by_problem.items():
        if item is not None:
            labels = shorten(dict.fromkeys(cell.label for cell in lacking))
            experiment.missing.append(replace(item, subject=f"{item.subject}: {labels}"))
    if ready:
        write_request(store.root, StoredRequest(experiment.title, str(request.data.resolve()), tuple(ready)))
    with request.watch(experiment.title, ready, store) as on_progress:
        experiment.failed = GridRun(ready, store, context, on_progress).run()
    return ready


def _images(cell: Cell) -> tuple[object, ...]:
    """Return what decides which images a cell needs."""
    unit = cell.candidates[0].target
    return cell.section, unit.dataset, unit.domains, unit.severities, unit.source


def _unfinished(cells: Sequence[Cell], experiment: Experiment) -> list[Item]:
    """Return an entry for each method that failed or lacks some streams, one for a section of which nothing was run."""
    store, failed = experiment.store, experiment.failed
    begun = {cell.section for cell in cells if complete(cell, store)}
    found = []
    for cell in cells:
        reason = next((failed[unit.key] for unit in cell.units() if unit.key in failed), "")
        if reason or not complete(cell, store):
            subject = f"{cell.section}: {cell.label}" if reason or cell.section in begun else cell.section
            found.append(((subject, reason), cell.candidates[0].target.stream_title))
    items = []
    for (subject, reason), on in grouped(found).items():
        names = shorten(dict.fromkeys(on))
        items.append(Item(subject, f"failed on {names}: {reason}" if reason else f"not run on {names}"))
    return items
