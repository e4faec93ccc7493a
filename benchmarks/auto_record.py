"""Run presets over streams once and keep, for every batch, what a score without labels could look at.

    python benchmarks/auto_record.py OUT design|held_out PRESET[,PRESET...] [STREAM ...]

For each stream and preset `OUT/<stream>/<preset>.npz` holds the logits of the online run (before the update), those of
a mirrored (digits: shifted) copy, how often each answer survives dropout of the features, and the labels.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from auto_streams import DESIGN, HELD_OUT, Stream
from torch import Tensor

import dpl
from dpl.model.adaptive import AdaptiveModel

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
BLENDS: dict[str, tuple[str, dict[str, Any]]] = {f"blend {a}": ("norm", {"norm": a}) for a in SHARES}
_BATCH = {"norm": "batch", "scope": "affine"}
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dg": ("dpl", {}),  # the paper's three presets
    "cifar": ("dpl", {**_BATCH, "lr": 1e-3}),
    "imagenet": ("dpl", {**_BATCH, "optimizer": "nesterov", "lr": 2.5e-4, "confidence": 0.4}),
    **{f"all {a}": ("dpl", {"norm": a}) for a in (0.1, 0.25, 0.5)},
    **{f"affine {a}": ("dpl", {"norm": a, "scope": "affine", "lr": 1e-3}) for a in (0.0, 0.1, 0.25, 0.5)},
}
PRESETS = BLENDS | LEARNERS | {"ours": ("auto", {})}
MIRRORED = (
    "c10 gaussian_noise 5",
    "c10 clean, sorted",
    "c10 contrast 5",
    "pacs sketch",
    "pacs cartoon, a source domain",
)
_DRAWS, _DROPPED = 10, 0.4


def moved(images: Tensor) -> Tensor:
    """Return an augmented copy: mirrored, or for digits shifted by two pixels."""
    return images.flip(3) if images.shape[1] == 3 else images.roll((1, 2), (2, 3))


@torch.no_grad()
def survival(features: Tensor, weight: Tensor, bias: Tensor, answers: Tensor, generator: torch.Generator) -> Tensor:
    """Return the share of dropout draws of the features that leave each answer as it is [B]."""
    keep = torch.rand(_DRAWS, *features.shape, generator=generator) >= _DROPPED
    dropped = features * keep / (1 - _DROPPED)
    return ((dropped @ weight.T + bias).argmax(dim=2) == answers).float().mean(dim=0)


def record(model: AdaptiveModel, batches: list[tuple[Tensor, Tensor]], mirror: bool) -> dict[str, Any]:
    """Run the stream and gather."""
    kept: dict[str, list[Tensor]] = {"logits": [], "moved": [], "survival": []}
    features: list[Tensor] = []
    head = model.network.classifier
    head.register_forward_pre_hook(lambda _layer, args: features.append(args[0].detach()))
    generator, seconds = torch.Generator().manual_seed(0), 0.0
    for images, _ in batches:
        if mirror:
            kept["moved"].append(model.predict(moved(images)))
        weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
        features.clear()
        start = time.perf_counter()
        kept["logits"].append(model(images))
        seconds += time.perf_counter() - start
        kept["survival"].append(survival(features[-1], weight, bias, kept["logits"][-1].argmax(dim=1), generator))
    sizes = [len(labels) for _, labels in batches]
    arrays = {name: torch.cat(parts).numpy() for name, parts in kept.items() if parts}
    return arrays | {"labels": torch.cat([y for _, y in batches]).numpy(), "sizes": sizes, "seconds": seconds}


def record_stream(stream: Stream, presets: dict[str, tuple[str, dict[str, Any]]], out: Path) -> None:
    """Record every preset that is not there yet."""
    folder = out / stream.name
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in presets if not (folder / f"{name}.npz").exists()]
    if not missing:
        return
    network, batches = stream.open()
    for name in missing:
        method, settings = presets[name]
        arrays = record(
            dpl.adapt(network, method, **settings), batches, mirror=stream.name in MIRRORED and method == "norm"
        )
        np.savez(folder / f"{name}.npz", **arrays)
        accuracy = 100 * (arrays["logits"].argmax(1) == arrays["labels"]).mean()
        print(f"{stream.name:40} {name:12} {accuracy:6.2f}  {arrays['seconds']:6.1f} s", flush=True)


def main() -> None:
    out, which, presets, *names = sys.argv[1:]
    chosen = {name: PRESETS[name] for name in (BLENDS if presets == "blends" else presets.split(","))}
    for stream in DESIGN if which == "design" else HELD_OUT:
        if not names or stream.name in names:
            record_stream(stream, chosen, Path(out))


if __name__ == "__main__":
    main()
