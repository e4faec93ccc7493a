"""Runs that `dpl adapt` wrote: a predictions file and the record beside it; several over one folder make one run."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpl.core.files import read_json
from dpl.report.runs import SOURCE, UNKNOWN, Experiment, Record, Run, Trace, labels_of, make_trace
from dpl.reproduce.document import Item, grouped, merged
from dpl.runs.folder import COLUMNS, record_path

__all__ = ["find_predictions", "joined", "read_predictions"]

# Of a run without a record, or with one that lacks an entry.
_DEFAULTS: Record = {
    "method": "adapted", "network": "network", "classes": [], "seed": 0, "settings": {}, "versions": {}, "result": {},
    "events": [], "total": 0, "timed": 0, "seconds": 0.0, "batch_size": 0, "guard": False,
}  # fmt: skip


class PredictionsFile(NamedTuple):
    """The lines of a predictions file that can be read, and what is known of how it was made."""

    lines: pd.DataFrame
    record: Record
    label: str  # the method, with the settings in which the files of a run differ
    stream: str  # the name of the folder of images
    data: Path | None
    status: str  # in a few words how much is finished
    problems: tuple[Item, ...]


def find_predictions(path: Path) -> list[Path]:
    """Return the predictions files at a path: itself, or those in a folder."""
    if path.is_file():
        record = path.name.endswith(".run.json")
        return [path.with_name(path.name.removesuffix(".run.json") + ".csv") if record else path]
    return [file for file in sorted(path.glob("*.csv")) if _header(file).startswith(",".join(COLUMNS))]


def _header(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline()


def read_predictions(path: Path, data: Path | None) -> Run:
    """Return the run that wrote a predictions file."""
    found = {name: value for name, value in read_json(record_path(path)).items() if value is not None}
    record = {**_DEFAULTS, **found}
    problems = [] if found else [Item(record_path(path).name, "there is no record of how these were made")]
    lines = _read_lines(path, problems)
    good = lines[lines.filter(["predicted", "source"]).ge(0).all(axis=1) & lines["confidence"].between(0, 1)]
    if broken := len(lines) - len(good):
        problems.append(Item(path.name, f"{broken:,} of {len(lines):,} lines cannot be read and are left out"))
    status, failed, total = "empty: no prediction", record["result"].get("failed", []), record["total"]
    if len(good):
        status = f"{len(good):,}{f' of {total:,}' if total else ''} images predicted"
        problems += [Item(str(Path(name).name), f"skipped: {reason}") for name, reason in failed]
        if (left := total - len(lines) - len(failed)) > 0:
            text = f"{left:,} of {total:,} images were not reached; run the command again to continue"
            problems.append(Item("not finished", text))
    folder = Path(record.get("images", path.stem))
    names = good["image"].str.removeprefix(os.path.join(folder, ""))
    return _run([PredictionsFile(good.assign(image=names), record, "", folder.name, data, status, merged(problems))])


def _read_lines(path: Path, problems: list[Item]) -> pd.DataFrame:
    """Return the lines of a predictions file, classes and confidences as numbers: NaN where they are none."""
    try:
        lines = pd.read_csv(path, dtype=str, na_filter=False, on_bad_lines="skip", encoding_errors="replace")
        if tuple(lines.columns[: len(COLUMNS)]) != COLUMNS:
            raise ValueError(f"expected the columns {', '.join(COLUMNS)}")
    except (OSError, ValueError) as error:
        problems.append(Item(path.name, f"not a predictions file ({error})"))
        lines = pd.DataFrame(columns=COLUMNS, dtype=str)
    numbers = lines.filter(["predicted", "confidence", "source"])
    return lines.assign(**{str(name): pd.to_numeric(values, errors="coerce") for name, values in numbers.items()})


def joined(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, those of the same network over the same folder of images as one."""

    def shared(run: Run) -> object:
        record = run.files[0].record if run.experiments and run.files else {}
        return (record["images"], record["network"], *run.experiments[0].classes) if "images" in record else None

    groups = grouped((shared(run) or number, run) for number, run in enumerate(runs))
    return [own[0] if len(own) == 1 else _run([file for run in own for file in run.files]) for own in groups.values()]


def _run(files: Sequence[PredictionsFile]) -> Run:
    """Return the files as one run; those that differ in the seed alone are averaged."""
    records = [file.record for file in files]
    varied = ({**record["settings"], **{k: record[k] for k in ("batch_size", "guard")}} for record in records)
    labels = labels_of([(str(record["method"]), own) for record, own in zip(records, varied, strict=True)])
    files = [file._replace(label=label) for file, label in zip(files, labels, strict=True)]
    return Run(
        name=f"{labels[0] if len(files) == 1 else f'{len(files)} runs'} on {files[0].stream}",
        status=files[0].status if len(files) == 1 else "; ".join(f"{file.label}: {file.status}" for file in files),
        experiments=(_experiment(files),) if len(files[0].lines) else (),
        problems=merged(item for file in files for item in file.problems),
        files=files,
    )


def _experiment(files: Sequence[PredictionsFile]) -> Experiment:
    """Return the predictions of one or several files over the same images."""
    record, stream = files[0].record, files[0].stream
    classes = _classes(pd.concat([file.lines for file in files]), record)
    images = pd.Index(dict.fromkeys(name for file in files for name in file.lines["image"]))
    traces: dict[tuple[str, str], dict[int, Trace]] = {}
    rows = []
    for file in files:
        seed = int(file.record["seed"])
        for name, trace in _traces(file, classes, images):
            by_seed = traces.setdefault((name, stream), {})
            if seed not in by_seed:  # several runs may have the source model's predictions
                by_seed[seed] = trace
                rows.append(_row(name, stream, trace, file.record))
    unknown = ("No record was found beside the predictions: settings and cost are not known.",)
    return Experiment(
        title=f"{stream}: {', '.join(file.label for file in files)}, {Path(str(record['network'])).name}",
        classes=classes,
        rows=sorted(rows, key=lambda row: row["label"] != SOURCE),
        traces=traces,
        facts=_facts([file for file in files if "images" in file.record]),
        data=[Path(p) for f in files for p in (f.record.get("images", "."), f.data, f.record.get("folder")) if p],
        images=images.to_list(),
        events=[event for file in files for event in _events(file)],
        guarded=any(file.record["guard"] for file in files),
        notes=() if "images" in record else unknown,
    )


def _traces(file: PredictionsFile, classes: Sequence[str], images: "pd.Index[str]") -> Iterator[tuple[str, Trace]]:
    """Yield the predictions of the source model, whose confidence is not recorded, and of the adapted one."""
    lines, image = file.lines, images.get_indexer(pd.Index(file.lines["image"]))
    numbers = {name: number for number, name in enumerate(classes) if name}
    truth = np.asarray(lines["label"].map(numbers).fillna(UNKNOWN), dtype=np.int64)
    if "source" in lines:
        yield SOURCE, make_trace(image, truth, lines["source"].to_numpy(np.int64), np.full(len(truth), np.nan))
    yield file.label, make_trace(image, truth, lines["predicted"].to_numpy(np.int64), lines["confidence"].to_numpy())


def _classes(lines: pd.DataFrame, record: Record) -> tuple[str, ...]:
    """Return the recorded names, then names of the file for numbers and labels beyond them."""
    known = [str(name) for name in record["classes"]]
    given = dict(zip(lines["predicted"].astype(int), lines["name"], strict=True))
    most = int(np.nanmax(lines.filter(["predicted", "source"]).to_numpy()))
    named = (*known, *(given.get(number) or f"class {number}" for number in range(len(known), most + 1)))
    return named if known else (*named, *sorted(set(lines["label"]) - {"", *named}))


def _row(label: str, stream: str, trace: Trace, record: Record) -> dict[str, Any]:
    """Return what is known of a method as a row like those of a benchmark."""
    row: dict[str, Any] = {
        "label": label, "method": label, "stream": stream, "seed": int(record["seed"]), "n": len(trace),
        "accuracy": 100.0 * float(trace.correct[trace.known].mean()) if trace.known.any() else None,
        "gflops_per_image": record.get("source_gflops_per_image"),
    }  # fmt: skip
    if label == SOURCE and record["method"] != SOURCE:
        return row
    facts = {**record["result"], **record}
    kept = ("gflops_per_image", "peak_bytes", "skipped_because", "trainable_values", "batches", "updates", "by_source")
    seconds = facts["seconds"] / facts["timed"] if facts["timed"] else None
    return row | {name: facts.get(name) for name in kept} | {"seconds_per_image": seconds}


def _events(file: PredictionsFile) -> Iterator[Record]:
    """Yield what the guard did, and after how many images."""
    for event in file.record["events"]:
        seen = min(event["batch"] * int(file.record["batch_size"]), len(file.lines))
        yield {"alarm": False, **event, "method": file.label, "seen": seen}


def _facts(files: Sequence[PredictionsFile]) -> dict[str, list[Item]]:
    """Return protocol, settings and versions of each run."""
    facts: dict[str, list[Item]] = {"Protocol": [], "Settings": [], "Versions": []} if files else {}
    for _, record, label, *_ in files:
        protocol = (
            f"{record['total']:,} images of a folder, {record.get('order')}; batch size {record['batch_size']}; "
            f"network {Path(str(record['network'])).name}; guard {'on' if record['guard'] else 'off'}"
        )
        settings = ", ".join(f"{name}={value}" for name, value in record["settings"].items())
        versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
        for items, text in zip(facts.values(), (protocol, settings, versions), strict=True):
            items.append(Item(label, text))
    return facts
