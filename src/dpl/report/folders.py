"""What `dpl adapt` wrote as a run: a predictions file, and the record beside it where there is one."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dpl.core.errors import DataError
from dpl.data.images import decode
from dpl.report.model import SOURCE, UNKNOWN, Event, Experiment, Gallery, Run, Track
from dpl.reproduce.document import Item
from dpl.runs.folder import COLUMNS
from dpl.runs.record import record_path

__all__ = ["find_predictions", "read_predictions"]

Record = Mapping[str, Any]


def find_predictions(path: Path) -> list[Path]:
    """Return the predictions files at a path: itself, or those in a folder."""
    if path.is_file():
        named = path.with_name(path.name.removesuffix(".run.json") + ".csv")
        return [named if path.name.endswith(".run.json") else path]
    return [file for file in sorted(path.glob("*.csv")) if _is_ours(file)]


def _is_ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(next(csv.reader(file), ())[: len(COLUMNS)]) == COLUMNS
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class _Answers:
    """The columns of a predictions file."""

    images: list[str]
    prediction: list[int]
    confidence: list[float]
    label: list[str]
    names: dict[int, str]
    source: list[int] | None
    broken: int


def read_predictions(path: Path, data: Path | None) -> Run:
    """Return the run that wrote a predictions file."""
    record = _record(record_path(path))
    problems = [] if record else [Item(record_path(path).name, "there is no record of how these were made")]
    answers = _answers(path, problems)
    experiments: tuple[Experiment, ...] = ()
    if answers is not None and answers.images:
        experiments = (_experiment(path, answers, record, data),)
        problems += _lacking(answers, record)
    total = record.get("total")
    count = len(answers.images) if answers is not None else 0
    status = f"{count:,} images predicted" if total is None else f"{count:,} of {total:,} images predicted"
    return Run(
        name=f"{record.get('method', 'predictions')} on {Path(str(record.get('images', path.stem))).name}",
        kind="folder of images",
        status=status if count else "empty: no prediction",
        whole=bool(experiments) and not problems,
        experiments=experiments,
        problems=tuple(problems),
        path=path,
    )


def _record(path: Path) -> Record:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _answers(path: Path, problems: list[Item]) -> _Answers | None:
    """Read a predictions file; lines that cannot be read are counted."""
    try:
        with path.open(encoding="utf-8", newline="", errors="replace") as file:
            lines = list(csv.reader(line.replace("\0", "") for line in file))
    except (OSError, csv.Error) as error:
        problems.append(Item(path.name, f"cannot be read ({error})"))
        return None
    if not lines or tuple(lines[0][: len(COLUMNS)]) != COLUMNS:
        problems.append(Item(path.name, f"not a predictions file; expected the columns {', '.join(COLUMNS)}"))
        return None
    has_source = "source" in lines[0]
    good = [line for line in lines[1:] if _readable(line, len(lines[0]), has_source)]
    broken = len(lines) - 1 - len(good)
    if broken:
        problems.append(Item(path.name, f"{broken:,} of {len(lines) - 1:,} lines cannot be read and are left out"))
    return _Answers(
        images=[line[0] for line in good],
        prediction=[int(line[1]) for line in good],
        confidence=[float(line[3]) for line in good],
        label=[line[4] for line in good],
        names={int(line[1]): line[2] for line in good if line[2]},
        source=[int(line[-1]) for line in good] if has_source else None,
        broken=broken,
    )


def _readable(line: Sequence[str], width: int, has_source: bool) -> bool:
    try:
        numbers = [int(line[1]), int(line[-1]) if has_source else 0]
        return len(line) == width and min(numbers) >= 0 and 0.0 <= float(line[3]) <= 1.0
    except (ValueError, IndexError):
        return False


def _lacking(answers: _Answers, record: Record) -> list[Item]:
    total = record.get("total")
    failed = record.get("result", {}).get("failed", [])
    items = [Item(str(Path(name).name), f"skipped: {reason}") for name, reason in failed]
    if total is not None and len(answers.images) + len(failed) + answers.broken < total:
        left = total - len(answers.images) - len(failed) - answers.broken
        items.append(
            Item("not finished", f"{left:,} of {total:,} images were not reached; run the command again to go on")
        )
    return items


def _experiment(path: Path, answers: _Answers, record: Record, data: Path | None) -> Experiment:
    method = str(record.get("method", "adapted"))
    stream = Path(str(record.get("images", path.stem))).name or path.stem
    classes = _classes(answers, record)
    places = {name: number for number, name in enumerate(classes)}
    label = np.asarray([places.get(name, UNKNOWN) if name else UNKNOWN for name in answers.label], dtype=np.int64)
    seed = int(record.get("seed", 0))
    rows = np.arange(len(answers.images))
    own = Track(seed, label, np.asarray(answers.prediction), np.asarray(answers.confidence, dtype=np.float64), rows)
    tracks = {(method, stream): [own]}
    methods: tuple[str, ...] = (method,)
    if answers.source is not None and method != SOURCE:
        silent = np.full(len(rows), np.nan)  # the source's confidence is not recorded
        tracks[SOURCE, stream] = [Track(seed, label, np.asarray(answers.source), silent, rows)]
        methods = (SOURCE, method)
    return Experiment(
        title=f"{stream}: {method}, {Path(str(record.get('network', 'network'))).name}",
        methods=methods,
        streams=(stream,),
        classes=classes,
        rows=[_row(name, stream, tracks[name, stream][0], record) for name in methods],
        tracks=tracks,
        facts=_facts(record),
        gallery=_FolderGallery(answers.images, record, data),
        events=tuple(_event(entry) for entry in record.get("events", []) if isinstance(entry, dict)),
        guarded=bool(record.get("guard")),
        notes=() if record else ("No record was found beside the predictions: settings and cost are not known.",),
    )


def _classes(answers: _Answers, record: Record) -> tuple[str, ...]:
    known = record.get("classes") or []
    most = max([*answers.prediction, *(answers.source or []), len(known) - 1])
    named = [*known, *(answers.names.get(number, f"class {number}") for number in range(len(known), most + 1))]
    others = sorted({name for name in answers.label if name} - set(named)) if not known else []
    return (*map(str, named), *others)


def _row(method: str, stream: str, track: Track, record: Record) -> dict[str, Any]:
    """Return what is known of a method as a row like those of a benchmark."""
    known = track.label != UNKNOWN
    row: dict[str, Any] = {
        "label": method, "method": method, "stream": stream, "seed": track.seed, "n": len(track), "batches": None,
        "accuracy": 100.0 * float(track.correct[known].mean()) if known.any() else None,
        "gflops_per_image": record.get("source_gflops_per_image"),
    }  # fmt: skip
    if method == SOURCE and record.get("method") != SOURCE:
        return row
    result = record.get("result", {})
    timed = record.get("timed") or 0
    return row | {
        "seconds_per_image": record.get("seconds", 0.0) / timed if timed else None,
        "gflops_per_image": record.get("gflops_per_image"),
        "peak_bytes": record.get("peak_bytes"),
        "batches": result.get("batches"),
        "updates": result.get("updates"),
        "skipped": (result.get("batches") or 0) - (result.get("updates") or 0),
        "skipped_because": record.get("skipped_because", {}),
        "trainable_values": record.get("trainable_values"),
        "unreadable": len(result.get("failed", [])),
        "by_source": result.get("by_source"),
    }


def _event(entry: Mapping[str, Any]) -> Event:
    return Event(
        int(entry.get("batch", 0)),
        str(entry.get("action", "")),
        str(entry.get("reason", "")),
        alarm=bool(entry.get("alarm")),
    )


def _facts(record: Record) -> tuple[tuple[str, tuple[Item, ...]], ...]:
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


class _FolderGallery(Gallery):
    """The images of a folder, by the names in the predictions file."""

    def __init__(self, names: Sequence[str], record: Record, data: Path | None) -> None:
        super().__init__()
        self._names = names
        self._given = Path(str(record.get("images", ".")))
        self._folders = [Path(path) for path in (data, record.get("folder")) if path]
        if names and self._find(names[0]) is None:
            self.reason = "the folder of the images is not here; name it with --data DIR"

    def _find(self, name: str) -> Path | None:
        path = Path(name)
        inside = path.relative_to(self._given) if path.is_relative_to(self._given) else Path(path.name)
        return next((p for p in (path, *(folder / inside for folder in self._folders)) if p.is_file()), None)

    def image(self, stream: str, track: Track, place: int) -> tuple[Image.Image, str]:
        """Return an image of the folder."""
        name = self._names[int(track.image[place])]
        path = self._find(name)
        if path is None:
            raise DataError(f"{Path(name).name} is not where it was")
        return decode(str(path)), path.name
