"""A run that `dpl adapt` wrote: a predictions file, and the record beside it."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpl.guard.events import GuardEvent
from dpl.report.runs import SOURCE, UNKNOWN, Experiment, Facts, PredictionTrace, Record, Run, read_json
from dpl.reproduce.document import Item
from dpl.runs.folder import COLUMNS
from dpl.runs.record import record_path

__all__ = ["find_predictions", "read_predictions"]


def find_predictions(path: Path) -> list[Path]:
    """Return the predictions files at a path: itself, or those in a folder."""
    if path.is_file():
        record = path.name.endswith(".run.json")
        return [path.with_name(path.name.removesuffix(".run.json") + ".csv") if record else path]
    return [file for file in sorted(path.glob("*.csv")) if _is_predictions_file(file)]


def _is_predictions_file(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(next(csv.reader(file), ())[: len(COLUMNS)]) == COLUMNS
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class _Predictions:
    """The lines of a predictions file that can be read."""

    lines: list[list[str]]
    with_source: bool = False
    broken: int = 0

    @property
    def predicted(self) -> list[int]:
        return [int(line[1]) for line in self.lines]

    @property
    def by_source(self) -> list[int]:
        """The predictions of the source model, where they were recorded."""
        return [int(line[-1]) for line in self.lines] if self.with_source else []


def read_predictions(path: Path, data: Path | None) -> Run:
    """Return the run that wrote a predictions file."""
    record = read_json(record_path(path))
    problems = [] if record else [Item(record_path(path).name, "there is no record of how these were made")]
    found = _read_lines(path, problems)
    count, total = len(found.lines), record.get("total")
    if count:
        problems += _not_predicted(found, record)
    status = f"{count:,} images predicted" if total is None else f"{count:,} of {total:,} images predicted"
    return Run(
        name=f"{record.get('method', 'predictions')} on {Path(str(record.get('images', path.stem))).name}",
        kind="folder of images",
        status=status if count else "empty: no prediction",
        whole=count > 0 and not problems,
        experiments=(_folder_experiment(path, found, record, data),) if count else (),
        problems=tuple(problems),
    )


def _read_lines(path: Path, problems: list[Item]) -> _Predictions:
    """Read a predictions file; lines that cannot be read are counted."""
    try:
        with path.open(encoding="utf-8", newline="", errors="replace") as file:
            head, *lines = list(csv.reader(line.replace("\0", "") for line in file)) or [[]]
    except (OSError, csv.Error) as error:
        problems.append(Item(path.name, f"cannot be read ({error})"))
        return _Predictions([])
    if tuple(head[: len(COLUMNS)]) != COLUMNS:
        problems.append(Item(path.name, f"not a predictions file; expected the columns {', '.join(COLUMNS)}"))
        return _Predictions([])
    with_source = "source" in head
    good = [line for line in lines if len(line) == len(head) and _is_readable(line, with_source)]
    broken = len(lines) - len(good)
    if broken:
        problems.append(Item(path.name, f"{broken:,} of {len(lines):,} lines cannot be read and are left out"))
    return _Predictions(good, with_source, broken)


def _is_readable(line: Sequence[str], with_source: bool) -> bool:
    try:
        classes = [int(line[1]), int(line[-1]) if with_source else 0]
        return min(classes) >= 0 and 0.0 <= float(line[3]) <= 1.0
    except ValueError:
        return False


def _not_predicted(found: _Predictions, record: Record) -> list[Item]:
    failed = record.get("result", {}).get("failed", [])
    items = [Item(str(Path(name).name), f"skipped: {reason}") for name, reason in failed]
    total = record.get("total") or 0
    left = total - len(found.lines) - len(failed) - found.broken
    if left > 0:
        text = f"{left:,} of {total:,} images were not reached; run the command again to continue"
        items.append(Item("not finished", text))
    return items


def _folder_experiment(path: Path, found: _Predictions, record: Record, data: Path | None) -> Experiment:
    method, folder = str(record.get("method", "adapted")), Path(str(record.get("images", ".")))
    stream = Path(str(record.get("images", path.stem))).name or path.stem
    classes = _folder_classes(found, record)
    traces = {(name, stream): [trace] for name, trace in _folder_traces(found, method, classes, record).items()}
    names = [Path(line[0]) for line in found.lines]
    return Experiment(
        title=f"{stream}: {method}, {Path(str(record.get('network', 'network'))).name}",
        methods=tuple(name for name, _ in traces),
        streams=(stream,),
        classes=classes,
        rows=[_folder_row(name, stream, trace, record) for (name, _), (trace,) in traces.items()],
        traces=traces,
        facts=_folder_facts(record),
        data=tuple(Path(place) for place in (folder, data, record.get("folder")) if place is not None),
        images=[str(name.relative_to(folder) if name.is_relative_to(folder) else name) for name in names],
        events=tuple(_event(entry) for entry in record.get("events", []) if isinstance(entry, dict)),
        guarded=bool(record.get("guard")),
        notes=() if record else ("No record was found beside the predictions: settings and cost are not known.",),
    )


def _folder_traces(
    found: _Predictions, method: str, classes: Sequence[str], record: Record
) -> dict[str, PredictionTrace]:
    """Return the predictions by method, the source model first."""
    numbers = {name: number for number, name in enumerate(classes) if name}
    label = np.asarray([numbers.get(line[4], UNKNOWN) for line in found.lines], dtype=np.int64)
    confidence = np.asarray([float(line[3]) for line in found.lines])
    seed, image = int(record.get("seed", 0)), np.arange(len(label))
    traces = {}
    if found.with_source and method != SOURCE:
        not_recorded = np.full(len(label), np.nan)
        traces[SOURCE] = PredictionTrace(seed, label, np.asarray(found.by_source), not_recorded, image)
    traces[method] = PredictionTrace(seed, label, np.asarray(found.predicted), confidence, image)
    return traces


def _folder_classes(found: _Predictions, record: Record) -> tuple[str, ...]:
    known = [str(name) for name in record.get("classes") or []]
    given = {int(line[1]): line[2] for line in found.lines if line[2]}
    count = max(len(known), *(number + 1 for number in (*found.predicted, *found.by_source)))
    named = [*known, *(given.get(number, f"class {number}") for number in range(len(known), count))]
    others = sorted({line[4] for line in found.lines if line[4]} - set(named)) if not known else []
    return (*named, *others)


def _folder_row(method: str, stream: str, trace: PredictionTrace, record: Record) -> dict[str, Any]:
    """Return what is known of a method as a row like those of a benchmark."""
    row: dict[str, Any] = {
        "label": method, "method": method, "stream": stream, "seed": trace.seed, "n": len(trace), "batches": None,
        "accuracy": 100.0 * float(trace.correct[trace.known].mean()) if trace.known.any() else None,
        "gflops_per_image": record.get("source_gflops_per_image"),
    }  # fmt: skip
    if method == SOURCE and record.get("method") != SOURCE:
        return row
    result = record.get("result", {})
    timed = record.get("timed") or 0
    of_record = ("gflops_per_image", "peak_bytes", "skipped_because", "trainable_values")
    return {
        **row,
        **{name: record.get(name) for name in of_record},
        **{name: result.get(name) for name in ("batches", "updates", "by_source")},
        "seconds_per_image": record.get("seconds", 0.0) / timed if timed else None,
        "skipped": (result.get("batches") or 0) - (result.get("updates") or 0),
        "unreadable": len(result.get("failed", [])),
    }


def _event(entry: Record) -> GuardEvent:
    return GuardEvent(int(entry.get("batch", 0)), str(entry.get("action", "")), str(entry.get("reason", "")))


def _folder_facts(record: Record) -> Facts:
    if not record:
        return ()
    protocol = (
        f"{record.get('total', 0):,} images of a folder, {record.get('order')}; batch size {record.get('batch_size')}; "
        f"network {Path(str(record.get('network'))).name}; guard {'on' if record.get('guard') else 'off'}"
    )
    settings = ", ".join(f"{name}={value}" for name, value in record.get("settings", {}).items())
    versions = ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())
    return (
        ("Protocol", (Item("", protocol),)),
        ("Settings", (Item(str(record.get("method")), settings),)),
        ("Versions", (Item("", versions),)),
    )
