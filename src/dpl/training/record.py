"""What train.json says: everything needed to repeat a run, and whether a folder holds the run that is asked for."""

import dataclasses
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import PIL
import torch

import dpl
from dpl.core.errors import SettingError
from dpl.core.files import file_sha256
from dpl.data import training
from dpl.streams import seed_hash
from dpl.training.sources import HOLDOUT, Sources
from dpl.training.spec import TrainSpec

__all__ = ["check_same", "describe", "session"]

Record = dict[str, Any]
FORMAT = 1


def describe(spec: TrainSpec, sources: Sources) -> Record:
    """Return the record of a run before its first step."""
    return {
        "format": FORMAT,
        "settings": _settings(spec, sources),
        "weights": None if spec.weights is None else str(spec.weights),
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
            "split": f"DomainBed, {HOLDOUT:.0%} of each source domain held out to validate",
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
    """Return what one process brings along: another version or number of threads may change the last bit."""
    return {
        "from_step": step,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "dpl": dpl.__version__,
        "torch": torch.__version__,
        "pillow": PIL.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def check_same(held: Record, asked: Record, folder: Path) -> None:
    """Refuse to go on with a run of other settings, naming the first that differs."""
    for name, value in asked["settings"].items():
        other = held["settings"].get(name)
        if other != value:
            raise SettingError(
                f"{folder} holds a run with {name}={other!r}; {name}={value!r} was asked for. "
                "Give another folder, or the same settings to go on with that run"
            )
    if held["data"]["images_sha256"] != asked["data"]["images_sha256"]:
        raise SettingError(f"{folder} holds a run on other images: files were added, removed or renamed since it began")


def _settings(spec: TrainSpec, sources: Sources) -> Record:
    """Return the settings with names as the benchmark spells them, and the weights' content in place of their path."""
    source = sources.domains[0].name if spec.source is not None else None
    settings = dataclasses.asdict(spec)
    settings |= {"dataset": sources.dataset, "target": sources.target, "source": source}
    settings["weights_sha256"] = None if spec.weights is None else file_sha256(Path(spec.weights))
    del settings["weights"]
    return settings
