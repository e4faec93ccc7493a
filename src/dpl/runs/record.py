"""What a run over a folder leaves beside its predictions: how it was run, what it cost, what the guard did."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpl.core.files import write_file
from dpl.guard import Guard
from dpl.model.adaptive import AdaptiveModel
from dpl.runs.costs import Work, environment, peak_memory
from dpl.runs.online import BatchResult

__all__ = ["FolderRecord", "record_path"]

FORMAT = 1
_EVENTS = 1000  # at most so many are kept
_REASONS = 20  # different ones; further ones count as others


def record_path(out: Path) -> Path:
    """Return the path of the record of a predictions file."""
    return out.with_suffix(".run.json")


@dataclass
class FolderRecord:
    """Grows batch by batch and is written now and then; what `kept` returns continues it in a resumed run."""

    seconds: float = 0.0
    timed: int = 0  # images in these seconds
    skipped_because: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    source_work: Work = field(default_factory=Work)

    def kept(self) -> dict[str, Any]:
        """Return all that was counted from the first batch on."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, Work)}

    def note(self, step: BatchResult[Any], guard: Guard | None) -> None:
        """Add one batch."""
        self.timed += len(step.predictions)
        self.seconds += step.seconds
        if (reason := step.skipped_because) is not None:
            known = reason in self.skipped_because or len(self.skipped_because) < _REASONS
            name = reason if known else "others"
            self.skipped_because[name] = self.skipped_because.get(name, 0) + 1
        if guard is not None:
            fresh = [e for e in guard.events if e.batch == guard.batches][: max(0, _EVENTS - len(self.events))]
            self.events += [{"batch": e.batch, "action": e.action, "reason": e.reason, "alarm": e.alarm} for e in fresh]

    def write(self, path: Path, facts: Mapping[str, Any], model: AdaptiveModel) -> None:
        """Put the record on the disk, whole or not at all."""
        costs = {
            "gflops_per_image": self.work.gflops_per_image,
            "source_gflops_per_image": self.source_work.gflops_per_image,
            "peak_bytes": peak_memory(),
        }
        content = {"format": FORMAT, **facts, **_model_facts(model), **self.kept(), **costs}
        write_file(path, json.dumps(content, indent=1))


def _model_facts(model: AdaptiveModel) -> dict[str, Any]:
    return {
        "method": model.method.info.name,
        "settings": json.loads(json.dumps(model.stored_settings(), default=str)),
        "guard": model.guard is not None,
        "trainable_values": sum(parameter.numel() for parameter in model.method.trainable.values()),
        "versions": environment(),
    }
