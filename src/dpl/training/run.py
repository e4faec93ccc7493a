"""What both kinds of training share: a network with its optimizer, and the folder from which a stopped run resumes.

The folder is complete whenever the run is stopped; docs/reference/files.md says what it holds.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise_tensors
from torch import Tensor, nn

from dpl.backbones.normalise import bare
from dpl.core.errors import DataError, SettingError, SnapshotError
from dpl.core.files import clear_drafts, file_sha256, lock, write_file
from dpl.core.optimizer import NamedOptimizer, OptimizerFactory
from dpl.core.state import Stateful, part_of
from dpl.runs.costs import environment
from dpl.snapshot import read_snapshot, write_snapshot
from dpl.training.distributed import ALONE, ProcessGroup

__all__ = ["Record", "RunFolder", "Trainer", "open_run"]

Record = dict[str, Any]


class Trainer(Stateful):
    """A network in the channels-last layout (up to twice as fast on a CPU), its optimizer, what was measured so far."""

    def __init__(self, network: nn.Module, device: torch.device, optimizer: OptimizerFactory) -> None:
        super().__init__()
        self.declare_module("network", bare(network))  # saved under its own names, without the normalisation layer
        self.network = network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = device
        self.optimizer = NamedOptimizer(dict(self.network.named_parameters()), optimizer, lr=0)  # it has its own
        self.history: list[Record] = []

    def best(self) -> Record:
        """Return the entry of the history whose weights are kept."""
        return self.history[-1]

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, in the host's memory and the default layout."""
        moments = {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        return {name: value.cpu().contiguous() for name, value in (super().state() | moments).items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything to a copy of `state`, on the trainer's device."""
        super().restore({name: value.to(self.device) for name, value in state.items()})
        self.optimizer.restore(part_of(state, "optimizer"))


class RunFolder:
    """The files of one run. Without a record they are only read: another process writes them."""

    def __init__(self, path: Path, record: Record | None = None) -> None:
        self.path, self.record, self.writes = path, record or {}, record is not None
        self.best, self._last = path / "best.safetensors", path / "last"
        self._began = time.perf_counter()

    def resume(self, trainer: Trainer) -> None:
        """Continue after the last save, if there is one."""
        if not (self._last.exists() or self._last.with_name(".last.previous").exists()):
            return
        try:
            notes, tensors = read_snapshot(self._last)
            trainer.restore(tensors)
            trainer.history = notes["history"]
        except (SnapshotError, KeyError, RuntimeError) as error:
            raise DataError(f"the run cannot resume: {error}. Remove {self._last} to start this run again") from error
        if not self.best.exists():
            raise DataError(f"{self.best} is missing; remove {self.path} to start this run again")
        self._began -= trainer.history[-1]["seconds"]

    def save(self, trainer: Trainer, measured: Record) -> None:
        """Write the learning curve, the weights if they are the best so far, and the state to resume from."""
        entry = measured | {"seconds": time.perf_counter() - self._began}  # without those that killed sessions lost
        trainer.history.append(entry)
        if not self.writes:
            return
        state = trainer.state()
        if trainer.best() is entry:
            write_file(self.best, serialise_tensors(part_of(state, "network")))
        write_file(self.path / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in trainer.history))
        write_snapshot(self._last, {"history": trainer.history}, state)

    def begin_session(self, step: int, trainer: Trainer, **facts: Any) -> None:
        """Note who goes on from where: another version or machine may change the last bit."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"from_step": step, "started": started, "device": str(trainer.device), **environment(), **facts}
        self._note(sessions=[*self.record.get("sessions", []), about])

    def finish(self, result: Record) -> None:
        """Note the result."""
        if self.writes:
            self._note(result=result | {"best_sha256": file_sha256(self.best)})

    def _note(self, **changes: Any) -> None:
        self.record |= changes
        if self.writes:
            write_file(self.path / "train.json", json.dumps(self.record, indent=2))


@contextmanager
def open_run(out: str | os.PathLike[str], asked: Record, group: ProcessGroup = ALONE) -> Iterator[RunFolder]:
    """Lock a folder for one run; yield it with the record that it holds, or with the one asked for if it is new.

    A folder with other files, or of a run with other settings, is refused. The first process of a group does this and
    writes, the others wait for it and read.
    """
    path = Path(out).resolve()
    if group.rank > 0:
        group.wait()
        yield RunFolder(path)
        return
    if path.exists() and not path.is_dir():
        raise SettingError(f"out={path} is a file; expected a folder for the run")
    path.mkdir(parents=True, exist_ok=True)
    if not (path / "train.json").exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise SettingError(f"out={path} holds other files and no training run; choose a new folder")
    with lock(path / ".lock", wait=False) as locked:
        if not locked:
            raise SettingError(f"out={path} is in use by another run; wait for it or choose a new folder")
        clear_drafts(path)
        folder = RunFolder(path, _same_run(path, asked))
        group.wait()
        yield folder


def _same_run(path: Path, asked: Record) -> Record:
    """Return the record in the folder, or the one asked for; refuse other settings, naming the first that differs."""
    file = path / "train.json"
    if not file.exists():
        return asked
    try:
        held: Record = json.loads(file.read_bytes())
        settings, images, _ = {**held["settings"]}, str(held["data"]["images_sha256"]), [*held["sessions"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is damaged ({error}); choose another folder") from error
    for name, value in asked["settings"].items():
        if settings.get(name) != value:
            raise SettingError(
                f"{path} holds a run with {name}={settings.get(name)!r}; {name}={value!r} was asked for. "
                "Give another folder, or the same settings to resume that run"
            )
    if images != asked["data"]["images_sha256"]:
        raise SettingError(f"{path} holds a run on other images: files were added, removed or renamed since it began")
    return held
