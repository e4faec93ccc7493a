"""Every registered method with the settings that make it quick on a tiny network."""

from typing import Any

import torch

from dpl.methods import get_method, list_methods
from dpl.testing import Subject
from nets import CLASSES, images, network

# Confidence and sizes that suit an untrained toy of five classes; everything else is the method's default.
QUICK: dict[str, dict[str, Any]] = {
    "adacontrast": {"queue_size": 64, "refine_after": 16},
    "cotta": {"views": 2},
    "foa": {"population": 4},
    "memo": {"views": 2, "augment": torch.clone},
    "rmt": {"warmup_samples": 0},
    "rotta": {"capacity": 16, "update_every": 16},
    "petta": {"capacity": 16},
    "note": {"capacity": 16, "update_every": 16},
    "sotta": {"capacity": 16, "update_every": 16},
    "swr_nsp": {"probes": 16, "epochs": 1},
}
COMPOSED = ["shot_im+dpl", "eata+dpl", "roid+dpl", "adacontrast+dpl", "sar+dpl", "tent+dpl", "tent+dpl_soft"]


def names() -> list[str]:
    return list_methods() + COMPOSED


def source_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    labels = [torch.arange(8) % CLASSES, (torch.arange(8) + 3) % CLASSES]
    return [(images(8, seed=100 + i), label) for i, label in enumerate(labels)]


def settings_for(name: str, kind: str) -> dict[str, Any]:
    fields = get_method(name).settings_class.__dataclass_fields__
    quick = {k: v for k, v in QUICK.get(name.split("+")[0], {}).items() if k in fields}
    for key in ("confidence", "dpl_confidence"):
        if key in fields:
            quick[key] = 0.3
    if kind == "none" and fields.get("scope") and fields["scope"].default == "affine":
        quick["scope"] = "all"
    return quick


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    """Enough for `calibrate=`."""
    return images(64, seed=200), torch.arange(64) % CLASSES


def subject(name: str, kind: str = "batch", **settings: Any) -> Subject:
    kind = "tokens" if name == "foa" else kind  # it puts prompts into a transformer
    needs_source = get_method(name).info.source != "never"
    return Subject(
        name,
        network(kind),
        [images(8, seed=i) for i in range(5)],
        {**settings_for(name, kind), **settings},
        source_batches() if needs_source else None,
    )
