"""An experiment on this machine: which cells have data and weights, their runs, and what is missing for the rest."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from dpl.reproduce.document import Item, grouped
from dpl.reproduce.layouts import Row
from dpl.reproduce.targets import Request

__all__ = ["Experiment", "nothing_measured", "open_quietly", "run_experiment"]

_QUICK_IMAGES, _QUICK_BATCHES = 200, 5  # of each stream, whichever are more: one batch shows every method equal


@dataclass(frozen=True)
class Experiment:
    """What an experiment file comes to on this machine: what can be run, what was measured, why the rest was not."""

    title: str
    sections: tuple[Section, ...]
    cells: tuple[Cell, ...]
    files: Mapping[str, Path]
    missing: tuple[Item, ...]
    request: Request
    store: Store
    failed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        """The measured rows."""
        return list(cell_rows(self.cells, self.store))

    def finished(self) -> list[tuple[Cell, Unit]]:
        """Return the cells that are done, each with the unit that counts."""
        return [(cell, chosen(cell, self.store).target) for cell in self.cells if complete(cell, self.store)]

    @cached_property
    def context(self) -> BenchContext:
        """What is needed to run images through the experiment's networks."""
        return BenchContext(self.request.data, self.files, cache=self.store.root / "cache", workers=1)


def run_experiment(path: Path, request: Request, only: Collection[str] | None = None) -> Experiment:
    """Run what the results folder lacks of an experiment file, unless asked not to; return what it has then.

    `only` names the rows that are wanted, None all of them.
    """
    plan = _plan(path, request, only)
    if request.run:
        return _run(plan)
    if not plan.finished() and (stored := _stored_cells(plan, only)):
        plan = replace(plan, cells=stored, missing=())
    return replace(plan, missing=(*plan.missing, *_not_run(plan.cells, plan.store)))


def _stored_cells(plan: Experiment, only: Collection[str] | None) -> tuple[Cell, ...]:
    """Return what was asked for under this title when the results were made; neither data nor weights are needed.

    Of several requests for one cell the last counts.
    """
    cells = {
        (cell.section, cell.label, cell.source, _stream(cell)): cell
        for request in read_requests(plan.store.root)
        if request.title == plan.title
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


def _plan(path: Path, request: Request, only: Collection[str] | None) -> Experiment:
    """Read an experiment file stream by stream, so that one without weights does not cost the others."""
    title, sections = read_sections(path)
    if only is not None and not any(entry.label in only for section in sections for entry in section.methods):
        raise SettingError(f"{path}: contains none of the requested rows: {', '.join(only)}")
    locations = FileLocations(request.data, request.weights, path.parent)
    cells: list[Cell] = []
    missing: list[Item] = []
    for section in sections:
        absent = _absence(section, locations)
        missing += absent
        if absent and request.run:
            continue
        lacking: dict[str, DataError] = {}
        with within(str(path)):
            found = section_cells(_shortened(section, request), locations, lacking)
        cells += [cell for cell in found if only is None or cell.label in only]
        missing += _without_weights(section.name, lacking)
    return Experiment(
        title, tuple(sections), tuple(cells), locations.files, tuple(missing), request, Store(request.store)
    )


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


def _without_weights(section: str, lacking: Mapping[str, DataError]) -> list[Item]:
    """Name the streams that lack the same file; where each lacks a file of its own, the first stands for all."""
    reasons = grouped((str(error), stream) for stream, error in lacking.items())
    if len(reasons) == len(lacking) > 1:
        reasons = {f"{next(iter(reasons))} (for the first of them)": list(lacking)}
    return [Item(section, f"{shorten(streams)}: {reason}") for reason, streams in reasons.items()]


def _absence(section: Section, locations: FileLocations) -> list[Item]:
    """Say what is wrong with a section's data set, nothing where it can be opened."""
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
        return [Item.of_error(section.name, error)]
    return []


def open_quietly(dataset: str, data: Path, **options: Any) -> Benchmark:
    """Open a data set without its warnings: in what it differs from the published one stands in the document."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_benchmark(dataset, data, **options)


def _run(plan: Experiment) -> Experiment:
    """Run the cells whose images are all here, and say what is missing for the others."""
    request, context = plan.request, plan.context
    context.device = str(choose_device())
    cells, missing = _with_data(plan.cells, context)
    if cells:
        write_request(plan.store.root, StoredRequest(plan.title, str(request.data.resolve()), tuple(cells)))
    with request.watch(plan.title, cells, plan.store) as on_progress:
        failed = request.engine(cells, plan.store, context, on_progress)
    reasons = [next((failed[unit.key] for unit in cell.units() if unit.key in failed), "") for cell in cells]
    told = list(zip(cells, reasons, strict=True))
    failures = grouped(((cell.section, cell.label, reason), _stream(cell)) for cell, reason in told if reason)
    missing += [
        Item(f"{section}: {label}", f"failed on {shorten(streams)}: {reason}")
        for (section, label, reason), streams in failures.items()
    ]
    missing += _not_run([cell for cell, reason in told if not reason], plan.store)
    return replace(plan, missing=(*plan.missing, *missing), failed=failed)


def _with_data(cells: Sequence[Cell], context: BenchContext) -> tuple[list[Cell], list[Item]]:
    """Return the cells whose images are all here, source images included, and for the others what is missing."""
    problems: dict[object, Item | None] = {}
    found = []
    for cell in cells:
        unit = cell.candidates[0].target
        needs = (cell.section, unit.dataset, unit.domains, unit.severities, unit.source)
        if needs not in problems:
            problems[needs] = _problem(cell, context)
        found.append((problems[needs], cell))
    by_problem = grouped(found)
    missing = [
        replace(problem, subject=f"{problem.subject}: {shorten(dict.fromkeys(cell.label for cell in members))}")
        for problem, members in by_problem.items()
        if problem is not None
    ]
    return by_problem.get(None, []), missing


def _problem(cell: Cell, context: BenchContext) -> Item | None:
    try:
        check_data(cell.units(), context)
    except DataError as error:
        return Item.of_error(cell.section, error)
    return None


def _not_run(cells: Sequence[Cell], store: Store) -> list[Item]:
    """Return an entry for each section of which nothing was run, and for each method that lacks some streams."""
    done = {cell.section for cell in cells if complete(cell, store)}
    unfinished = [cell for cell in cells if not complete(cell, store)]
    items = [Item(name, "not run") for name in dict.fromkeys(c.section for c in unfinished) if name not in done]
    streams = grouped((f"{c.section}: {c.label}", _stream(c)) for c in unfinished if c.section in done)
    return items + [Item(subject, f"not run on {shorten(names)}") for subject, names in streams.items()]


def _stream(cell: Cell) -> str:
    return cell.candidates[0].target.stream_title
