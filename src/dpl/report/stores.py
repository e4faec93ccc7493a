"""A folder of `dpl bench` (or `dpl reproduce`) as a run: whole, half-finished, damaged or empty."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dpl.bench import Candidate, Cell, Unit, cell_rows
from dpl.bench.plans import StoredRequest, read_requests
from dpl.bench.selection import chosen, complete
from dpl.core.errors import DataError
from dpl.data.folders import shorten
from dpl.report.audit import AuditedStore
from dpl.report.gallery import bench_gallery
from dpl.report.model import Experiment, Run, Track
from dpl.reproduce.document import Item
from dpl.reproduce.facts import protocol_items, setting_items, version_lines
from dpl.reproduce.layouts import Row

__all__ = ["read_store"]

_SHARED = ("dataset", "corrupt", "part", "holdout", "limit", "files", "transform", "protocol", "order", "delta",
           "visits", "network")  # fmt: skip


def read_store(root: Path, data: Path | None) -> Run:
    """Return what a folder of results holds."""
    store = AuditedStore(root)
    problems = list(store.broken)
    plans = _plans(root, problems)
    cases = _cases(plans, store)
    problems += _lacking(cases, store, known=bool(plans))
    groups: dict[str, list[Cell]] = {}
    for case in cases:
        if complete(case, store):
            groups.setdefault(repr(_group(case)), []).append(case)
    folder = data or next((Path(plan.data) for plan in reversed(plans) if Path(plan.data).is_dir()), None)
    experiments = tuple(_experiment(members, store, folder, problems) for members in groups.values())
    planned = len(cases) if plans else None
    done = sum(map(len, groups.values()))
    return Run(
        name=plans[-1].title if plans else root.resolve().name,
        kind="benchmark",
        status=_status(done, planned, problems),
        whole=done > 0 and not problems,
        experiments=experiments,
        problems=tuple(problems),
        path=root,
    )


def _plans(root: Path, problems: list[Item]) -> list[StoredRequest]:
    try:
        return read_requests(root)
    except DataError as error:
        problems.append(Item("plan", str(error).replace(str(root), root.name)))
        return []


def _cases(plans: Sequence[StoredRequest], store: AuditedStore) -> list[Cell]:
    """Return what was asked for, each case once, and then what lies there though nobody's plan has it."""
    cases = {(c.section, c.label, tuple(u.key for u in c.units())): c for plan in plans for c in plan.cells}
    covered = {unit.key for case in cases.values() for unit in case.units()}
    rest = [unit for unit in store.units() if unit.key not in covered and unit.part != "outside"]
    return [*cases.values(), *_unplanned(rest)]


def _unplanned(units: Sequence[Unit]) -> list[Cell]:
    """Make cases of units without a plan: the method names them, and what its units differ in."""
    by_method: dict[str, list[Unit]] = {}
    for unit in units:
        by_method.setdefault(repr((*(getattr(unit, name) for name in _SHARED), unit.method)), []).append(unit)
    cases = []
    for members in by_method.values():
        settings = [{**unit.settings, "batch_size": unit.batch_size} for unit in members]
        names = dict.fromkeys(name for values in settings for name in values if name != "seed")
        varied = [name for name in names if len({repr(values.get(name)) for values in settings}) > 1]
        for unit, values in zip(members, settings, strict=True):
            words = ", ".join(f"{name}={values.get(name)}" for name in varied)
            label = f"{unit.method} ({words})" if words else unit.method
            source = unit.trained_on[0] if len(unit.trained_on) == 1 else None
            cases.append(Cell(unit.dataset, label, unit.seed, (Candidate({}, unit),), source))
    return sorted(cases, key=lambda case: (case.candidates[0].target.method != "source", case.label))


def _group(case: Cell) -> tuple[object, ...]:
    """Return what cases must share to stand in one table."""
    unit = case.candidates[0].target
    return (case.section, *(getattr(unit, name) for name in _SHARED))


def _lacking(cases: Sequence[Cell], store: AuditedStore, *, known: bool) -> list[Item]:
    """Say which cases are not complete, and why as far as anyone knows."""
    failures, begun = store.failures(), set(store.begun())
    planned = {unit.key for case in cases for unit in case.units()}
    items = [
        Item(str(note.get("unit", key)), f"failed: {note.get('reason', 'no reason was noted')}")
        for key, note in failures.items()
    ]
    items += [Item(key, "begun and not finished: it runs now, or was ended early") for key in begun - planned]
    waiting: dict[tuple[str, str], list[str]] = {}
    for case in cases if known else ():
        keys = {unit.key for unit in case.units()}
        if complete(case, store) or keys & failures.keys():
            continue
        state = "begun and not finished: running now, or ended early" if keys & begun else "not run yet"
        waiting.setdefault((case.label, state), []).append(case.candidates[0].target.stream_title)
    return items + [Item(label, f"{state}: {shorten(names)}") for (label, state), names in waiting.items()]


def _status(done: int, planned: int | None, problems: Sequence[Item]) -> str:
    if not done:
        return "empty: no finished result" if not problems else "nothing finished that can be shown"
    count = f"{done:,} finished" if planned is None else f"{done:,} of {planned:,} finished"
    return f"{count}, {len(problems)} {'problem' if len(problems) == 1 else 'problems'}" if problems else count


def _experiment(cases: Sequence[Cell], store: AuditedStore, data: Path | None, problems: list[Item]) -> Experiment:
    rows = [dict(row) | {"stream": _stream(row)} for row in cell_rows(cases, store)]
    tracks: dict[tuple[str, str], list[Track]] = {}
    for case in cases:
        _add_tracks(tracks, case, store, problems)
    classes = next((tuple(row["classes"]) for row in rows if row.get("classes")), ())
    gallery, found = bench_gallery([chosen(case, store).target for case in cases], rows, data)
    count = len(rows[0]["per_class"])
    unit = cases[0].candidates[0].target
    return Experiment(
        title=f"{cases[0].section}: {unit.protocol.replace('_', ' ')}, {unit.network}",
        methods=tuple(dict.fromkeys(row["label"] for row in rows)),
        streams=tuple(dict.fromkeys(row["stream"] for row in rows)),
        classes=classes or found or tuple(f"class {number}" for number in range(count)),
        rows=rows,
        tracks=tracks,
        facts=_facts(rows),
        gallery=gallery,
        notes=tuple(dict.fromkeys(note for row in rows for note in row["data_notes"])),
    )


def _add_tracks(
    tracks: dict[tuple[str, str], list[Track]], case: Cell, store: AuditedStore, problems: list[Item]
) -> None:
    unit = chosen(case, store).target
    try:
        arrays = store.predictions(unit)
        names = ("segment", "domain", "sample", "label", "prediction", "confidence")
        segment, domain, sample, label, prediction, confidence = (arrays[name] for name in names)
    except (DataError, KeyError):
        if not any(unit.key in item.subject for item in problems):
            problems.append(Item(f"{unit.title} ({unit.key})", "predictions.npz cannot be read"))
        return
    for number, record in enumerate(store.records(unit)):
        row = {"column": f"{case.source}->{record['segment']}" if case.source else record["segment"], **record}
        rows = np.flatnonzero(segment == number)
        track = Track(
            seed=case.seed,
            label=label[rows].astype(np.int64),
            prediction=prediction[rows].astype(np.int64),
            confidence=confidence[rows].astype(np.float64),
            image=(domain[rows].astype(np.int64) << 32) + sample[rows].astype(np.int64),
        )
        tracks.setdefault((case.label, _stream(row)), []).append(track)


def _stream(row: Row) -> str:
    """Name a segment; one that comes again has the number of its visit."""
    visit = row.get("visit") or 0
    return f"{row['column']} (visit {visit + 1})" if visit else str(row["column"])


def _facts(rows: Sequence[Row]) -> tuple[tuple[str, tuple[Item, ...]], ...]:
    return (
        ("Protocol", protocol_items(rows)),
        ("Settings", setting_items(rows)),
        ("Versions", _plain([", ".join(version_lines(rows))])),
    )


def _plain(texts: Iterable[str]) -> tuple[Item, ...]:
    return tuple(Item("", text) for text in texts)
