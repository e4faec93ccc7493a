"""What a run over a folder leaves beside its predictions: how it was run, what it cost, what the guard did."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpl.core.files import write_file
from dpl.model.adaptive import AdaptiveModel
from dpl.runs.costs import Work, environment, forget_peak, peak_memory
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
    """Grows batch by batch and is written now and then; a run that is resumed continues it."""

    path: Path
    facts: Mapping[str, Any]
    seconds: float = 0.0
    images: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    source_work: Work = field(default_factory=Work)
    _batches: int = 0  # of the guard, whose events were taken

    @classmethod
    def begin(cls, out: Path, facts: Mapping[str, Any], model: AdaptiveModel, resumed: bool) -> "FolderRecord":
        """Return a fresh record, or what was recorded before a resumed run."""
        record = cls(record_path(out), dict(facts) | _model_facts(model))
        record._batches = 0 if model.guard is None else model.guard.batches
        forget_peak()
        before = record._read() if resumed else {}
        record.seconds = float(before.get("seconds", 0.0))
        record.images = int(before.get("timed", 0))
        record.reasons.update(before.get("skipped_because", {}))
        record.events = [event for event in before.get("events", []) if event["batch"] <= record._batches]
        return record

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self, step: BatchResult[Any], model: AdaptiveModel) -> None:
        """Add one batch."""
        self.images += len(step.predictions)
        self.seconds += step.seconds
        if (reason := step.skipped_because) is not None:
            self.reasons[reason if reason in self.reasons or len(self.reasons) < _REASONS else "others"] += 1
        if model.guard is not None:
            fresh = [event for event in model.guard.events if event.batch > self._batches]
            self.events += [
                {"batch": e.batch, "action": e.action, "reason": e.reason, "alarm": e.alarm} for e in fresh
            ][: max(0, _EVENTS - len(self.events))]
            self._batches = model.guard.batches

    def write(self, result: Mapping[str, Any], total: int) -> None:
        """Put the record on the disk, whole or not at all."""
        content = {
            "format": FORMAT,
            **self.facts,
            "result": dict(result),
            "total": total,
            "seconds": self.seconds,
            "timed": self.images,
            "gflops_per_image": self.work.gflops_per_image,
            "source_gflops_per_image": self.source_work.gflops_per_image,
            "peak_bytes": peak_memory(),
            "skipped_because": dict(self.reasons),
            "events": self.events,
        }
        write_file(self.path, json.dumps(content, indent=1))


def _model_facts(model: AdaptiveModel) -> dict[str, Any]:
    return {
        "method": model.method.info.name,
        "settings": json.loads(json.dumps(model.stored_settings(), default=str)),
        "guard": model.guard is not None,
        "trainable_values": sum(parameter.numel() for parameter in model.method.trainable.values()),
        "versions": environment(),
    }
