"""The folder of a training run, which is complete whenever the run is stopped.

train.json        settings, data, versions, result: everything needed to repeat the run
log.jsonl         the learning curve, one line per validation
best.safetensors  the weights with the highest mean validation accuracy
last/             the state to resume from
curves.png        a plot of the learning curve, if matplotlib is installed
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from dpl.core.errors import DataError, MissingExtraError, SettingError, SnapshotError
from dpl.core.extras import optional
from dpl.core.files import clear_drafts, file_sha256, lock, write_file
from dpl.data import training
from dpl.runs.costs import environment
from dpl.snapshot import read_snapshot, write_snapshot
from dpl.streams import seed_hash
from dpl.training.sources import HOLDOUT, Sources, TrainSpec

__all__ = ["Record", "RunFolder", "draw_curves", "new_record", "open_run", "session"]

Record = dict[str, Any]
_FORMAT = 1


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.best = path / "best.safetensors"
        self.curves = path / "curves.png"
        self._record = path / "train.json"
        self._log = path / "log.jsonl"
        self._last = path / "last"

    def write_record(self, record: Record) -> None:
        """Write train.json."""
        write_file(self._record, json.dumps(record, indent=2))

    def read_record(self) -> Record | None:
        """Return train.json, or None if the folder is new."""
        if not self._record.exists():
            return None
        try:
            record = json.loads(self._record.read_bytes())
            complete = isinstance(record["settings"], dict) and isinstance(record["sessions"], list)
            if not complete or not isinstance(record["data"]["images_sha256"], str):
                raise TypeError("not a record of a run")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._record} is damaged ({error}); choose another folder") from error
        return record  # type: ignore[no-any-return]

    def write_log(self, history: list[Record]) -> None:
        """Write the learning curve."""
        write_file(self._log, "".join(json.dumps(entry) + "\n" for entry in history))

    def write_best(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights under their plain names."""
        write_file(self.best, serialise_tensors(dict(weights)))

    def write_state(self, progress: Record, tensors: Mapping[str, Tensor]) -> None:
        """Write the state to resume from; the previous one stays until this one is complete."""
        write_snapshot(self._last, progress, tensors)

    def read_state(self) -> tuple[Record, dict[str, Tensor]] | None:
        """Return what `write_state` wrote, or None if nothing was saved yet."""
        if not (self._last.exists() or self._last.with_name(".last.previous").exists()):
            return None
        try:
            return read_snapshot(self._last)
        except SnapshotError as error:
            raise DataError(f"{error}. Remove {self._last} to start this run again") from error


@contextmanager
def open_run(out: str | os.PathLike[str], asked: Record) -> Iterator[tuple[RunFolder, Record]]:
    """Lock a folder for one run; yield it with the record that it holds, or with the one asked for if it is new.

    A folder with other files, or of a run with other settings, is refused.
    """
    path = Path(out).resolve()
    if path.exists() and not path.is_dir():
        raise SettingError(f"out={path} is a file; expected a folder for the run")
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "train.json").exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise SettingError(f"out={path} holds other files and no training run; choose a new folder")
    with lock(path / ".lock", wait=False) as locked:
        if not locked:
            raise SettingError(f"out={path} is in use by another run; wait for it or choose a new folder")
        clear_drafts(path)
        folder = RunFolder(path)
        held = folder.read_record() or asked
        _check_same_run(held, asked, path)
        yield folder, held


def new_record(spec: TrainSpec, sources: Sources) -> Record:
    """Return the record of a run before its first step, with the benchmark's spelling of names."""
    settings = dataclasses.asdict(spec)
    weights = settings.pop("weights")
    settings |= {"dataset": sources.dataset, "target": sources.target}
    settings["source"] = None if spec.source is None else sources.domains[0].name
    settings["weights_sha256"] = None if weights is None else file_sha256(Path(weights))
    return {
        "format": _FORMAT,
        "settings": settings,
        "weights": None if weights is None else str(weights),
        "data": {
            "images_sha256": sources.digest,
            "classes": list(sources.classes),
            "domains": {
                domain.name: {
                    "images": domain.images,
                    "training": len(domain.training),
                    "validation": len(domain.validation),
                    "split_seed": seed_hash(spec.trial_seed, domain.index),
                }
                for domain in sources.domains
            },
        },
        "protocol": {
            "split": f"DomainBed, {HOLDOUT:.0%} of each source domain held out for validation",
            "batch": "per_domain images of each source domain, drawn with replacement",
            "optimizer": "Adam, betas 0.9 and 0.999, eps 1e-8, weight decay 0, constant learning rate",
            "batch_norm": "batch statistics in training, running ones in validation",
            "augmentation": dataclasses.asdict(training(spec.size)),
            "validation": f"resized to {spec.size} x {spec.size}, not augmented",
            "selection": "highest mean accuracy over the source domains; of equals the earliest",
        },
        "sessions": [],
        "result": None,
    }


def session(step: int, device: torch.device) -> Record:
    """Return the versions and the machine of one process: another one may change the last bit."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"from_step": step, "started": started, "device": str(device), **environment()}


def _check_same_run(held: Record, asked: Record, folder: Path) -> None:
    """Refuse to resume a run with different settings, naming the first that differs."""
    for name, value in asked["settings"].items():
        other = held["settings"].get(name)
        if other != value:
            raise SettingError(
                f"{folder} holds a run with {name}={other!r}; {name}={value!r} was asked for. "
                "Give another folder, or the same settings to resume that run"
            )
    if held["data"]["images_sha256"] != asked["data"]["images_sha256"]:
        raise SettingError(f"{folder} holds a run on other images: files were added, removed or renamed since it began")


def draw_curves(history: list[Record], title: str, path: Path) -> bool:
    """Draw loss and validation accuracy over the steps; return False if matplotlib is not installed."""
    try:
        figure = optional("matplotlib.figure", "bench").Figure(figsize=(9, 3.5), layout="constrained")
    except MissingExtraError:
        return False
    steps = [entry["step"] for entry in history]
    best = max(history, key=lambda entry: entry["mean"])
    losses, accuracies = figure.subplots(1, 2)
    losses.plot(steps, [entry["loss"] for entry in history], color="black")
    losses.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    for domain in history[0]["validation"]:
        accuracies.plot(steps, [entry["validation"][domain] for entry in history], label=domain, linewidth=1)
    accuracies.plot(steps, [entry["mean"] for entry in history], label="mean", color="black", linewidth=2)
    accuracies.axvline(best["step"], color="grey", linestyle=":", label=f"kept: step {best['step']}")
    accuracies.set(xlabel="step", ylabel="source validation accuracy, %")
    accuracies.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    return True
