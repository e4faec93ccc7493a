"""An experiment on this machine: which cells have data and weights, their runs, and what is missing for the rest."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpl.bench import BenchContext, Cell, FileLocations, Store, Unit, cell_rows
from dpl.bench.grid import section_cells
from dpl.bench.images import CORRUPTED, check_data, known_domains
from dpl.bench.plans import StoredRequest, read_requests, write_request
from dpl.bench.section import Section, read_sections, within
from dpl.bench.selection import chosen, complete
from dpl.core.errors import DataError, SettingError
from dpl.core.extras import choose_device
from dpl.data import Benchmark, open_benchmark
from dpl.data.folders import shorten
from dpl.reproduce.document import Item
from dpl.reproduce.layouts import Row
from dpl.reproduce.targets import Request

__all__ = [
    "Experiment",
    "ExperimentPlan",
    "image_context",
    "make_plan",
    "nothing_measured",
    "open_quietly",
    "run_experiment",
]

_QUICK_IMAGES, _QUICK_BATCHES = 200, 5  # of each stream, whichever are more: one batch shows every method equal


@dataclass(frozen=True)
class ExperimentPlan:
    """What an experiment file comes to on this machine."""

    title: str
    sections: tuple[Section, ...]
    cells: tuple[Cell, ...]
    files: Mapping[str, Path]
    missing: tuple[Item, ...]


@dataclass(frozen=True)
class Experiment:
    """The measured rows of a plan, and why others are not there."""

    plan: ExperimentPlan
    rows: list[Row]
    missing: tuple[Item, ...]
    failed: dict[str, str]
    store: Store

    def finished(self) -> list[tuple[Cell, Unit]]:
        """Return the cells that are done, each with the unit that counts."""
        cells = self.plan.cells
        return [(cell, chosen(cell, self.store).target) for cell in cells if complete(cell, self.store)]


def run_experiment(path: Path, request: Request, only: Collection[str] | None = None) -> Experiment:
    """Run what the results folder lacks of an experiment file, unless asked not to; return what it has then.

    `only` names the rows that are wanted, None all of them.
    """
    plan = make_plan(path, request, only)
    store = Store(request.store)
    missing, failed = list(plan.missing), {}
    runnable: Sequence[Cell] = plan.cells
    if request.run:
        context = image_context(plan, request)
        context.device = str(choose_device())
        runnable, absent = _with_data(plan.cells, context)
        missing += absent
        failed = _run(plan.title, runnable, store, context, request)
    elif not any(complete(cell, store) for cell in plan.cells) and (stored := _stored_cells(plan.title, store, only)):
        plan, missing = replace(plan, cells=stored, missing=()), []
        runnable = stored
    missing += _failures(runnable, failed)
    missing += _not_run([cell for cell in runnable if _failure(cell, failed) is None], store)
    return Experiment(plan, list(cell_rows(plan.cells, store)), tuple(missing), failed, store)


def image_context(plan: ExperimentPlan, request: Request) -> BenchContext:
    """Return what is needed to run images through the experiment's networks."""
    return BenchContext(request.data, plan.files, cache=request.store / "cache", workers=1)


def _stored_cells(title: str, store: Store, only: Collection[str] | None) -> tuple[Cell, ...]:
    """Return what was asked for under this title when the results were made; neither data nor weights are needed.

    Of several requests for one cell the last counts.
    """
    cells = {
        (cell.section, cell.label, cell.source, cell.candidates[0].target.stream_title): cell
        for request in read_requests(store.root)
        if request.title == title
        for cell in request.cells
    }
    return tuple(cell for cell in cells.values() if only is None or cell.label in only)


def nothing_measured(name: str, request: Request, missing: Sequence[Item]) -> DataError:
    """Return the error that says why there is no figure to show."""
    reasons = "".join(f"\n{item.lines()}" for item in missing)
    if request.run:
        return DataError(f"{name}: nothing could be run{reasons}")
    return DataError(
        f"--no-run: {request.store} holds no result of {name} with these settings; leave --no-run out to run it, or "
        f"name the folder of its results with --store{reasons}"
    )


def make_plan(path: Path, request: Request, only: Collection[str] | None = None) -> ExperimentPlan:
    """Read an experiment file stream by stream, so that one without weights does not cost the others."""
    title, sections = read_sections(path)
    if only is not None and not any(entry.label in only for section in sections for entry in section.methods):
        raise SettingError(f"{path}: contains none of the requested rows: {', '.join(only)}")
    locations = FileLocations(request.data, request.weights, path.parent)
    cells: list[Cell] = []
    missing: list[Item] = []
    for section in sections:
        absent = _absence(section, locations)
        if absent is not None:
            missing.append(absent)
            if request.run:
                continue
        lacking: dict[str, DataError] = {}
        with within(str(path)):
            found = section_cells(_shortened(section, request), locations, lacking)
        cells += [cell for cell in found if only is None or cell.label in only]
        missing += [Item(section.name, f"{shorten(streams)}: {reason}") for reason, streams in _by_reason(lacking)]
    return ExperimentPlan(title, tuple(sections), tuple(cells), locations.files, tuple(missing))


def _shortened(section: Section, request: Request) -> Section:
    """Return the section with the seeds and images asked for; a quick one has no search."""
    largest = max(entry.batch_size or section.batch_size for entry in section.methods)
    quick = max(_QUICK_IMAGES, _QUICK_BATCHES * largest) if request.quick else None
    known = [limit for limit in (section.limit, request.limit, quick) if limit is not None]
    section = replace(section, seeds=_seeds(section.seeds, request), limit=min(known, default=None))
    return replace(section, selection=None, oracle=False) if request.quick else section


def _seeds(seeds: tuple[int, ...], request: Request) -> tuple[int, ...]:
    """Return as many seeds as asked for: those of the file, then the numbers after them."""
    count = 1 if request.quick and request.seeds is None else request.seeds or len(seeds)
    further = range(max(seeds) + 1, max(seeds) + 1 + count)
    return (*seeds, *further)[:count]


def _by_reason(lacking: Mapping[str, DataError]) -> list[tuple[str, list[str]]]:
    """Group streams that lack the same; where each lacks a file of its own, the first stands for all."""
    reasons: dict[str, list[str]] = {}
    for stream, error in lacking.items():
        reasons.setdefault(str(error), []).append(stream)
    if len(reasons) == len(lacking) > 1:
        return [(f"{next(iter(reasons))} (for the first of them)", list(lacking))]
    return list(reasons.items())


def _absence(section: Section, locations: FileLocations) -> Item | None:
    """Say what is wrong with a section's data set, None where it can be opened."""
    options: dict[str, Any] = {}
    try:
        for name in ("images", "classes"):
            if value := getattr(section, name):
                options[name] = locations.find(value)
        if section.dataset in CORRUPTED:
            first = (section.domains or known_domains(section.dataset, True))[:1]
            options |= {"domains": first, "severity": section.severities[0]}
        open_quietly(section.dataset, locations.data, **options)
    except DataError as error:
        return Item.of_error(section.name, error)
    return None


def open_quietly(dataset: str, data: Path, **options: Any) -> Benchmark:
    """Open a data set without its warnings: in what it differs from the published one stands in the document."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_benchmark(dataset, data, **options)


def _with_data(cells: Sequence[Cell], context: BenchContext) -> tuple[list[Cell], list[Item]]:
    """Return the cells whose images are all here, source images included, and for the others what is missing."""
    problems: dict[object, DataError | None] = {}
    present: list[Cell] = []
    missing: dict[tuple[str, str], tuple[DataError, dict[str, None]]] = {}
    for cell in cells:
        unit = cell.candidates[0].target
        needs = (unit.dataset, unit.domains, unit.severities, unit.source)
        if needs not in problems:
            problems[needs] = _problem(cell, context)
        problem = problems[needs]
        if problem is None:
            present.append(cell)
        else:
            missing.setdefault((cell.section, str(problem)), (problem, {}))[1][cell.label] = None
    items = [
        Item.of_error(f"{section}: {shorten(labels)}", problem) for (section, _), (problem, labels) in missing.items()
    ]
    return present, items


def _problem(cell: Cell, context: BenchContext) -> DataError | None:
    try:
        check_data(cell.units(), context)
    except DataError as error:
        return error
    return None


def _run(title: str, cells: Sequence[Cell], store: Store, context: BenchContext, request: Request) -> dict[str, str]:
    if cells:
        write_request(store.root, StoredRequest(title, str(request.data.resolve()), tuple(cells)))
    with request.watch(title, cells, store) as on_progress:
        return request.engine(cells, store, context, on_progress)


def _failure(cell: Cell, failed: Mapping[str, str]) -> str | None:
    return next((failed[unit.key] for unit in cell.units() if unit.key in failed), None)


def _failures(cells: Sequence[Cell], failed: Mapping[str, str]) -> list[Item]:
    """Return an entry for each method and reason, with the streams on which it failed."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if (reason := _failure(cell, failed)) is not None:
            found.setdefault((cell.section, cell.label, reason), []).append(_stream(cell))
    return [
        Item(f"{section}: {label}", f"failed on {shorten(streams)}: {reason}")
        for (section, label, reason), streams in found.items()
    ]


def _not_run(cells: Sequence[Cell], store: Store) -> list[Item]:
    """Return an entry for each section of which nothing was run, and for each method that lacks some streams."""
    done = {cell.section for cell in cells if complete(cell, store)}
    unfinished = [cell for cell in cells if not complete(cell, store)]
    items = [Item(name, "not run") for name in dict.fromkeys(c.section for c in unfinished) if name not in done]
    streams: dict[tuple[str, str], list[str]] = {}
    for cell in unfinished:
        if cell.section in done:
            streams.setdefault((cell.section, cell.label), []).append(_stream(cell))
    return items + [Item(f"{s}: {label}", f"not run on {shorten(names)}") for (s, label), names in streams.items()]


def _stream(cell: Cell) -> str:
    return cell.candidates[0].target.stream_title
