"""Run or resume an experiment through the benchmark engine, and gather what was measured and what was not."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpl.bench import BenchContext, Cell, Store, cell_rows, run_cells, run_in_processes
from dpl.bench.images import check_data
from dpl.bench.plans import StoredRequest, write_request
from dpl.bench.section import Section
from dpl.bench.selection import complete
from dpl.core.errors import DataError
from dpl.data.folders import shorten
from dpl.reproduce.document import Item
from dpl.reproduce.plan import Plan, data_item, make_plan
from dpl.reproduce.request import Request

__all__ = ["Gathered", "gather"]


@dataclass(frozen=True)
class Gathered:
    """Measured rows, and why others are not there."""

    rows: list[dict[str, Any]]
    sections: tuple[Section, ...]
    cases: tuple[Cell, ...]
    missing: tuple[Item, ...]
    failed: dict[str, str]
    store: Store


def gather(path: Path, request: Request, only: Collection[str] | None = None) -> Gathered:
    """Run what an experiment file has and the store has not, unless asked not to; return what the store has then."""
    plan = make_plan(path, request, only)
    store = Store(request.store)
    missing, failed = list(plan.missing), {}
    runnable: Sequence[Cell] = plan.cases
    if request.run:
        context = BenchContext(
            request.data, plan.files, cache=request.cache or request.store / "cache", decoded=request.cache, workers=1
        )
        runnable, absent = _with_data(plan.cases, context, request)
        missing += absent
        failed = _run(plan, runnable, store, context, request)
    missing += _failures(runnable, failed)
    missing += _not_run([case for case in runnable if not _has_failed(case, failed)], store)
    return Gathered(cell_rows(plan.cases, store), plan.sections, plan.cases, tuple(missing), failed, store)


def _with_data(cases: Sequence[Cell], context: BenchContext, request: Request) -> tuple[list[Cell], list[Item]]:
    """Return the cases whose images are all here, source images included, and for the others what is missed."""
    problems: dict[object, DataError | None] = {}
    notes: dict[str, None] = {}
    kept: list[Cell] = []
    missing: dict[tuple[str, str], dict[str, None]] = {}
    for case in cases:
        unit = case.candidates[0].target
        needs = (unit.dataset, unit.domains, unit.severities, unit.source)
        if needs not in problems:
            problems[needs] = _problem(case, context, notes)
        problem = problems[needs]
        if problem is None:
            kept.append(case)
        else:
            missing.setdefault((case.section, str(problem)), {})[case.label] = None
    return kept, [
        data_item(f"{section}: {shorten(labels)}", DataError(text)) for (section, text), labels in missing.items()
    ]


def _problem(case: Cell, context: BenchContext, notes: dict[str, None]) -> DataError | None:
    try:
        notes |= dict.fromkeys(check_data(case.units(), context))
    except DataError as error:
        return error
    return None


def _run(plan: Plan, cases: Sequence[Cell], store: Store, context: BenchContext, request: Request) -> dict[str, str]:
    torch.set_num_threads(request.threads)
    if cases:
        write_request(store.root, StoredRequest(plan.title, str(request.data.resolve()), tuple(cases)))
    with request.watch(plan.title, cases, store) as on_event:
        if request.engine is not None:
            return request.engine(cases, store, context, on_event)
        if request.workers > 1:
            return run_in_processes(cases, store, context, request.workers, request.threads, on_event)
        return run_cells(cases, store, context, on_event)


def _has_failed(case: Cell, failed: dict[str, str]) -> bool:
    return any(unit.key in failed for unit in case.units())


def _failures(cases: Sequence[Cell], failed: dict[str, str]) -> list[Item]:
    """Return an entry for each method and reason, with the streams on which it failed."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        reason = next((failed[unit.key] for unit in case.units() if unit.key in failed), None)
        if reason is not None:
            found.setdefault((case.section, case.label, reason), []).append(_stream(case))
    return [
        Item(f"{section}: {label}", f"failed on {shorten(streams)}: {reason}")
        for (section, label, reason), streams in found.items()
    ]


def _not_run(cases: Sequence[Cell], store: Store) -> list[Item]:
    """Return an entry for each section of which nothing was run, and for each method that lacks some streams."""
    open_cases = [case for case in cases if not complete(case, store)]
    begun = {case.section for case in cases if complete(case, store)}
    items = [Item(name, "not run") for name in dict.fromkeys(c.section for c in open_cases) if name not in begun]
    streams: dict[tuple[str, str], list[str]] = {}
    for case in open_cases:
        if case.section in begun:
            streams.setdefault((case.section, case.label), []).append(_stream(case))
    return items + [Item(f"{s}: {label}", f"not run on {shorten(names)}") for (s, label), names in streams.items()]


def _stream(case: Cell) -> str:
    return case.candidates[0].target.stream_title
