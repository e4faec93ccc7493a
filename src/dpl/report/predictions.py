"""A run that `dpl adapt` wrote: a predictions file, and the record beside it."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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


def read_predictions(path: Path, data: Path | None) -> Run:
    """Return the run that wrote a predictions file."""
    record = read_json(record_path(path))
    problems = [] if record else [Item(record_path(path).name, "there is no record of how these were made")]
    lines = _read_lines(path, problems)
    good = lines[_readable(lines)]
    if broken := len(lines) - len(good):
        problems.append(Item(path.name, f"{broken:,} of {len(lines):,} lines cannot be read and are left out"))
    if len(good):
        problems += _not_predicted(len(lines), record)
    count, total = len(good), record.get("total")
    status = f"{count:,} images predicted" if total is None else f"{count:,} of {total:,} images predicted"
    return Run(
        name=f"{record.get('method', 'predictions')} on {Path(str(record.get('images', path.stem))).name}",
        kind="folder of images",
        status=status if count else "empty: no prediction",
        whole=count > 0 and not problems,
        experiments=(_folder_experiment(path, good, record, data),) if count else (),
        problems=tuple(problems),
    )


def _read_lines(path: Path, problems: list[Item]) -> pd.DataFrame:
    """Return the lines of a predictions file, classes and confidences as numbers: NaN where they are none."""
    try:
        lines = pd.read_csv(path, dtype=str, na_filter=False, on_bad_lines="skip", encoding_errors="replace")
        if tuple(lines.columns[: len(COLUMNS)]) != COLUMNS:
            raise ValueError(f"expected the columns {', '.join(COLUMNS)}")
    except (OSError, ValueError) as error:
        problems.append(Item(path.name, f"not a predictions file ({error})"))
        return pd.DataFrame({name: [] for name in COLUMNS})
    for name in {"predicted", "confidence", "source"} & set(lines.columns):
        lines[name] = pd.to_numeric(lines[name], errors="coerce")
    return lines


def _readable(lines: pd.DataFrame) -> "pd.Series[bool]":
    """Say which lines have what a line must have."""
    by_source = lines["source"] if "source" in lines else lines["predicted"]
    return lines["predicted"].ge(0) & by_source.ge(0) & lines["confidence"].between(0, 1)


def _not_predicted(count: int, record: Record) -> list[Item]:
    failed = record.get("result", {}).get("failed", [])
    items = [Item(str(Path(name).name), f"skipped: {reason}") for name, reason in failed]
    total = record.get("total") or 0
    if (left := total - count - len(failed)) > 0:
        text = f"{left:,} of {total:,} images were not reached; run the command again to continue"
        items.append(Item("not finished", text))
    return items


def _folder_experiment(path: Path, lines: pd.DataFrame, record: Record, data: Path | None) -> Experiment:
    method, folder = str(record.get("method", "adapted")), Path(str(record.get("images", ".")))
    stream = Path(str(record.get("images", path.stem))).name or path.stem
    classes = _folder_classes(lines, record)
    traces = {(name, stream): [trace] for name, trace in _folder_traces(lines, method, classes, record).items()}
    names = [Path(name) for name in lines["image"]]
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
    lines: pd.DataFrame, method: str, classes: tuple[str, ...], record: Record
) -> dict[str, PredictionTrace]:
    """Return the predictions by method, the source model first."""
    numbers = {name: number for number, name in enumerate(classes) if name}
    label = np.asarray(lines["label"].map(numbers).fillna(UNKNOWN), dtype=np.int64)
    seed, image = int(record.get("seed", 0)), np.arange(len(label))
    confidence = {method: lines["confidence"].to_numpy(float), SOURCE: np.full(len(label), np.nan)}  # not recorded
    columns = {SOURCE: "source"} if "source" in lines else {}
    columns[method] = "predicted"
    return {
        name: PredictionTrace(seed, label, np.asarray(lines[column], dtype=np.int64), confidence[name], image)
        for name, column in columns.items()
    }


def _folder_classes(lines: pd.DataFrame, record: Record) -> tuple[str, ...]:
    """Return the recorded names, then names of the file for numbers and labels beyond them."""
    known = [str(name) for name in record.get("classes") or []]
    given = dict(zip(lines["predicted"].astype(int), lines["name"], strict=True))
    most = int(lines[[name for name in ("predicted", "source") if name in lines]].to_numpy().max())
    named = [*known, *(given.get(number) or f"class {number}" for number in range(len(known), most + 1))]
    others = [] if known else sorted(set(lines["label"]) - {"", *named})
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
