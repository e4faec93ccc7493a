"""What a job on a folder leaves beside its predictions: how it was run, what it cost, what the guard did."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpl.model.adaptive import AdaptiveModel
from dpl.runs.costs import Work, environment, forget_peak, peak_memory

__all__ = ["FolderRecord", "record_path"]

FORMAT = 1
_EVENTS = 1000  # kept; counts go on
_REASONS = 20


def record_path(out: Path) -> Path:
    """Return where the record of a predictions file lies."""
    return out.with_suffix(".run.json")


@dataclass
class FolderRecord:
    """Grows batch by batch and is written now and then; a job that is resumed goes on with it."""

    path: Path
    facts: Mapping[str, Any]
    seconds: float = 0.0
    images: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    source_work: Work = field(default_factory=Work)
    _looked: int = 0  # batches of the guard whose events were taken

    @classmethod
    def begin(cls, out: Path, facts: Mapping[str, Any], model: AdaptiveModel, resumed: bool) -> "FolderRecord":
        """Return a fresh record, or of a resumed job what was recorded before."""
        record = cls(record_path(out), dict(facts) | _model_facts(model))
        record._looked = 0 if model.guard is None else model.guard.batches
        forget_peak()
        before = record._read() if resumed else {}
        record.seconds = float(before.get("seconds", 0.0))
        record.images = int(before.get("timed", 0))
        record.reasons.update(before.get("skipped_because", {}))
        record.events = [event for event in before.get("events", []) if event["batch"] <= record._looked]
        return record

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self, model: AdaptiveModel, images: int, seconds: float) -> None:
        """Take in one batch."""
        self.images += images
        self.seconds += seconds
        if not model.last.get("updated", False):
            reason = str(model.last.get("reason", "no reason was given"))
            self.reasons[reason if reason in self.reasons or len(self.reasons) < _REASONS else "others"] += 1
        if model.guard is not None:
            fresh = [event for event in model.guard.events if event.batch > self._looked]
            self.events += [
                {"batch": e.batch, "action": e.action, "reason": e.reason, "alarm": e.alarm} for e in fresh
            ][: max(0, _EVENTS - len(self.events))]
            self._looked = model.guard.batches

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
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(draft, self.path)


def _model_facts(model: AdaptiveModel) -> dict[str, Any]:
    return {
        "method": model.method.info.name,
        "settings": json.loads(json.dumps(model.stored_settings(), default=str)),
        "guard": model.guard is not None,
        "trainable_values": sum(parameter.numel() for parameter in model.method.trainable.values()),
        "versions": environment(),
    }
