"""Runs that `dpl adapt` wrote: a predictions file and the record beside it; several over one folder make one run."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpl.guard.events import GuardEvent
from dpl.report.runs import SOURCE, UNKNOWN, Experiment, Facts, PredictionTrace, Record, Run, labels_of, read_json
from dpl.reproduce.document import Item, grouped, merged
from dpl.runs.folder import COLUMNS
from dpl.runs.record import record_path

__all__ = ["find_predictions", "joined", "read_predictions"]


_NO_RECORD = "No record was found beside the predictions: settings and cost are not known."
# Of a run without a record, or with one that lacks an entry.
_DEFAULTS: Record = {
    "method": "adapted", "network": "network", "classes": [], "seed": 0, "settings": {}, "versions": {}, "result": {},
    "events": [], "total": 0, "timed": 0, "seconds": 0.0, "batch_size": 0, "guard": False,
}  # fmt: skip


class PredictionsFile(NamedTuple):
    """The lines of a predictions file that can be read, and what is known of how it was made."""

    lines: pd.DataFrame
    record: Record
    stream: str
    """The name of the folder of images."""
    data: Path | None
    problems: tuple[Item, ...]

    def images(self) -> list[str]:
        """Return the names of the images below their folder, in the order of their arrival."""
        folder = self.record.get("images", ".")
        paths = map(Path, self.lines["image"])
        return [str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in paths]

    def status(self) -> str:
        """Say in a few words how much is finished."""
        of = f" of {self.record['total']:,}" if self.record["total"] else ""
        return f"{len(self.lines):,}{of} images predicted" if len(self.lines) else "empty: no prediction"


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
    found = {name: value for name, value in read_json(record_path(path)).items() if value is not None}
    record = {**_DEFAULTS, **found, "known": bool(found)}
    problems = [] if found else [Item(record_path(path).name, "there is no record of how these were made")]
    lines = _read_lines(path, problems)
    by_source = lines["source"] if "source" in lines else lines["predicted"]
    good = lines[lines["predicted"].ge(0) & by_source.ge(0) & lines["confidence"].between(0, 1)]
    if broken := len(lines) - len(good):
        problems.append(Item(path.name, f"{broken:,} of {len(lines):,} lines cannot be read and are left out"))
    if len(good):
        problems += _not_predicted(len(lines), record)
    stream = Path(str(record.get("images", path.stem))).name or path.stem
    return _run([PredictionsFile(good, record, stream, data, merged(problems))])


def joined(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, those of the same network over the same folder of images as one."""
    groups = grouped((_shared(run) or number, run) for number, run in enumerate(runs))
    return [own[0] if len(own) == 1 else _run([file for run in own for file in run.files]) for own in groups.values()]


def _shared(run: Run) -> object:
    """Return what runs must have in common to be compared, None for a run that stands alone."""
    record = run.files[0].record if run.experiments and run.files else {}
    return (record["images"], record["network"], *run.experiments[0].classes) if "images" in record else None


def _run(files: Sequence[PredictionsFile]) -> Run:
    """Return the files as one run."""
    labels = labels_of([(str(record["method"]), _varied(record)) for _, record, *_ in files])
    status = [f"{label}: {file.status()}" for label, file in zip(labels, files, strict=True)]
    return Run(
        name=f"{labels[0] if len(files) == 1 else f'{len(files)} runs'} on {files[0].stream}",
        kind="folder of images",
        status=files[0].status() if len(files) == 1 else "; ".join(status),
        whole=all(len(file.lines) and not file.problems for file in files),
        experiments=(_experiment(files, labels),) if len(files[0].lines) else (),
        problems=merged(item for file in files for item in file.problems),
        files=tuple(files),
    )


def _varied(record: Record) -> Record:
    """Return in what runs of one method may differ; runs that differ in the seed alone are averaged."""
    return {**record["settings"], "batch_size": record["batch_size"], "guard": record["guard"]}


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


def _not_predicted(count: int, record: Record) -> list[Item]:
    failed, total = record["result"].get("failed", []), record["total"]
    items = [Item(str(Path(name).name), f"skipped: {reason}") for name, reason in failed]
    if (left := total - count - len(failed)) > 0:
        text = f"{left:,} of {total:,} images were not reached; run the command again to continue"
        items.append(Item("not finished", text))
    return items


def _experiment(files: Sequence[PredictionsFile], labels: Sequence[str]) -> Experiment:
    """Return the predictions of one or several files over the same images."""
    first = files[0]
    classes = _classes(pd.concat([file.lines for file in files]), first.record)
    images = pd.Index(dict.fromkeys(name for file in files for name in file.images()))
    traces: dict[tuple[str, str], list[PredictionTrace]] = {}
    rows = []
    for file, label in zip(files, labels, strict=True):
        for name, trace in _traces(file, label, classes, images).items():
            own = traces.setdefault((name, first.stream), [])
            if trace.seed not in [other.seed for other in own]:  # several runs may have the source model's predictions
                own.append(trace)
                rows.append(_row(name, first.stream, trace, file.record))
    return Experiment(
        title=f"{first.stream}: {', '.join(labels)}, {Path(str(first.record['network'])).name}",
        methods=tuple(sorted((name for name, _ in traces), key=lambda name: name != SOURCE)),
        streams=(first.stream,),
        classes=classes,
        rows=rows,
        traces=traces,
        facts=_facts(files, labels),
        data=tuple(Path(p) for f in files for p in (f.record.get("images", "."), f.data, f.record.get("folder")) if p),
        images=images.to_list(),
        events=[event for file, label in zip(files, labels, strict=True) for event in _events(file, label)],
        guarded=any(file.record["guard"] for file in files),
        notes=()
        if "images" in first.record
        else ("No record was found beside the predictions: settings and cost are not known.",),
    )


def _traces(
    file: PredictionsFile, label: str, classes: Sequence[str], images: "pd.Index[str]"
) -> dict[str, PredictionTrace]:
    """Return the predictions by method, the source model first."""
    lines = file.lines
    numbers = {name: number for number, name in enumerate(classes) if name}
    truth = np.asarray(lines["label"].map(numbers).fillna(UNKNOWN), dtype=np.int64)
    seed, image = int(file.record["seed"]), images.get_indexer(pd.Index(file.images()))
    confidence = {label: lines["confidence"].to_numpy(float), SOURCE: np.full(len(truth), np.nan)}  # not recorded
    columns = ({SOURCE: "source"} if "source" in lines else {}) | {label: "predicted"}
    return {
        name: PredictionTrace(seed, truth, np.asarray(lines[column], dtype=np.int64), confidence[name], image)
        for name, column in columns.items()
    }


def _classes(lines: pd.DataFrame, record: Record) -> tuple[str, ...]:
    """Return the recorded names, then names of the file for numbers and labels beyond them."""
    known = [str(name) for name in record["classes"]]
    given = dict(zip(lines["predicted"].astype(int), lines["name"], strict=True))
    most = int(np.nanmax(lines[[name for name in ("predicted", "source") if name in lines]].to_numpy()))
    named = [*known, *(given.get(number) or f"class {number}" for number in range(len(known), most + 1))]
    others = [] if known else sorted(set(lines["label"]) - {"", *named})
    return (*named, *others)


def _row(label: str, stream: str, trace: PredictionTrace, record: Record) -> dict[str, Any]:
    """Return what is known of a method as a row like those of a benchmark."""
    row: dict[str, Any] = {
        "label": label, "method": label, "stream": stream, "seed": trace.seed, "n": len(trace), "batches": None,
        "accuracy": 100.0 * float(trace.correct[trace.known].mean()) if trace.known.any() else None,
        "gflops_per_image": record.get("source_gflops_per_image"),
    }  # fmt: skip
    if label == SOURCE and record["method"] != SOURCE:
        return row
    result, timed = record["result"], record["timed"]
    of_record = ("gflops_per_image", "peak_bytes", "skipped_because", "trainable_values")
    return {
        **row,
        **{name: record.get(name) for name in of_record},
        **{name: result.get(name) for name in ("batches", "updates", "by_source")},
        "seconds_per_image": record["seconds"] / timed if timed else None,
        "skipped": (result.get("batches") or 0) - (result.get("updates") or 0),
        "unreadable": len(result.get("failed", [])),
    }


def _events(file: PredictionsFile, label: str) -> list[Record]:
    """Return what the guard did, and after how many images."""
    events: list[Record] = []
    for entry in (entry for entry in file.record["events"] if isinstance(entry, dict)):
        event = GuardEvent(int(entry.get("batch", 0)), str(entry.get("action", "")), str(entry.get("reason", "")))
        seen = min(event.batch * int(file.record["batch_size"]), len(file.lines))
        facts = {"batch": event.batch, "action": event.action, "reason": event.reason, "alarm": event.alarm}
        events.append({"method": label, "seen": seen, **facts})
    return events


def _facts(files: Sequence[PredictionsFile], labels: Sequence[str]) -> Facts:
    """Return protocol, settings and versions, each with the runs for which they hold."""
    found: dict[str, list[tuple[str, str]]] = {"Protocol": [], "Settings": [], "Versions": []}
    for record, label in zip((file.record for file in files if file.record["known"]), labels, strict=False):
        protocol = (
            f"{record['total']:,} images of a folder, {record.get('order')}; batch size {record['batch_size']}; "
            f"network {Path(str(record['network'])).name}; guard {'on' if record['guard'] else 'off'}"
        )
        settings = ", ".join(f"{name}={value}" for name, value in record["settings"].items())
        versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
        for title, text in zip(found, (protocol, settings, versions), strict=True):
            found[title].append((text, label))
    return tuple(
        (title, tuple(Item(", ".join(own), text) for text, own in grouped(pairs).items()))
        for title, pairs in found.items()
        if pairs
    )
