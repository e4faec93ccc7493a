"""The guard on streams that it was not tuned on: accuracy of source, unguarded and guarded model.

    DPL_DATA=/path/to/data python benchmarks/guard_table.py --out runs/guard --network resnet20
    DPL_DATA=/path/to/data python benchmarks/guard_table.py --out runs/guard --sensitivity  # half and twice each

Resumable: one line of OUT/guard.jsonl for each network, stream, method, mode and seed. Modes: `off`, `on` (guard=True),
`calibrated` (guard=True with 500 labelled source images), and `limit=4`, one setting changed. `DPL_DATA` is that of
benchmarks/estimate_study.py.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from estimate_study import BATCH, METHODS, Run, as_tensor, load, positions, stream
from torch import Tensor

import dpl
from dpl.estimate import EstimateSettings
from dpl.guard import GuardSettings

Batches = Iterator[tuple[Tensor, Tensor]]
NO_LABEL = -1
MODES: dict[str, dict[str, Any]] = {"off": {"guard": False}, "on": {"guard": True}, "calibrated": {"guard": True}}
OF_GUARD = ("limit", "allowance", "memory", "share", "glance", "surprise", "freeze_rows", "forget_after")
OF_ESTIMATE = ("least_shift", "class_worth", "alike")
VARIED_ON = (
    "half constant frames",
    "noise, one clean class, noise",
    "clean",
    "speckle noise, sorted",
    "noise",
)


def one_changed() -> dict[str, dict[str, Any]]:
    """Return the modes with one setting at half or twice its default."""
    guard, estimate, modes = GuardSettings(), EstimateSettings(), {}
    for name in OF_GUARD + OF_ESTIMATE:
        usual = getattr(guard if name in OF_GUARD else estimate, name)
        for value in (usual / 2, usual * 2):
            value = type(usual)(value)
            changed = {"guard": {name: value}}
            if name in OF_ESTIMATE:
                changed = {"guard": True, "estimate": {name: value, "share": guard.share}}
            modes[f"{name}={value:g}"] = changed
    return modes


def with_frames(share: float, value: float | None) -> Callable[..., Batches]:
    """Replace a share of each batch by constant frames: of one value, or each of its own."""

    def make(run: Run, images: Any, labels: Tensor) -> Batches:
        for batch, known in stream(run._replace(corruption="clean", order="shuffled"), images, labels):
            count = int(share * len(batch))
            frames = torch.linspace(0, 1, count) if value is None else torch.full((count,), value)
            batch[:count], known = frames[:, None, None, None], known.clone()
            known[:count] = NO_LABEL
            yield batch, known

    return make


def ordered(corruption: str, order: str) -> Callable[..., Batches]:
    return lambda run, images, labels: stream(run._replace(corruption=corruption, order=order), images, labels)


def interrupted(run: Run, images: Any, labels: Tensor) -> Batches:
    """Noise, then one clean class, then noise again."""
    part = run.images // 3 // BATCH * BATCH
    noisy = list(stream(run._replace(corruption="gaussian_noise", order="shuffled", images=2 * part), images, labels))
    rows = positions(labels, "one class", part, run.seed)
    clean = [(as_tensor(images[r.numpy()]), labels[r]) for r in rows.split(BATCH)]
    yield from [*noisy[: len(noisy) // 2], *clean, *noisy[len(noisy) // 2 :]]


STREAMS: dict[str, Callable[..., Batches]] = {
    "half constant frames": with_frames(0.5, None),
    "a quarter constant frames": with_frames(0.25, None),
    "half black frames": with_frames(0.5, 0.0),
    "one class of a noisy stream": ordered("gaussian_noise", "one class"),
    "noise, 80 % one class": ordered("gaussian_noise", "skewed"),
    "noise, one clean class, noise": interrupted,
    "clean": ordered("clean", "shuffled"),
    "clean, sorted": ordered("clean", "sorted"),
    "one clean class": ordered("clean", "one class"),
    "fog, sorted": ordered("fog", "sorted"),
    "pixelate, sorted": ordered("pixelate", "sorted"),
    "fog": ordered("fog", "shuffled"),
    "speckle noise, sorted": ordered("speckle_noise", "sorted"),
    "noise": ordered("gaussian_noise", "shuffled"),
}


def play(network: str, name: str, method: str, mode: str, seed: int, count: int) -> dict[str, Any]:
    """Run one stream; return the accuracies in percent and what the guard did."""
    source, images, labels = load(network)
    kind, settings = METHODS[method]
    known = (as_tensor(images[:500]), labels[:500]) if mode == "calibrated" else None
    asked = (MODES | one_changed())[mode]
    model = dpl.adapt(source, kind, calibrate=known, layout="as_is", **asked, **settings)
    right = np.zeros(3)
    for batch, label in STREAMS[name](Run(network, "clean", "shuffled", method, count, seed), images, labels):
        with torch.no_grad():
            guesses = [logits.argmax(dim=1) for logits in (source(batch), model(batch))]
        scored = label != NO_LABEL
        right += [*(int((guess == label)[scored].sum()) for guess in guesses), int(scored.sum())]
    acted = {} if model.guard is None else {action: n for action, n in model.guard.counts.items() if n}
    by_source, own = (100 * right[:2] / right[2]).round(1).tolist()
    return {"source": by_source, "accuracy": own, "images": int(right[2]), "actions": acted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/guard"))
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--streams", nargs="*", default=list(STREAMS))
    parser.add_argument("--methods", nargs="*", default=["tent", "dpl", "dpl_soft"])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--sensitivity", action="store_true", help="change one setting at a time; prints a table")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "guard.jsonl"
    done = {tuple(json.loads(line)["run"]) for line in log.read_text().splitlines()} if log.exists() else set()
    if args.sensitivity:
        args.methods, args.streams, args.modes = ["tent"], VARIED_ON, ["off", "on", *one_changed()]
    for run in product([args.network], args.streams, args.methods, args.modes, args.seeds):
        if run not in done:
            found = {"run": run, **play(*run, args.images)}
            with log.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
    if args.sensitivity:
        print(sensitivity_table([json.loads(line) for line in log.read_text().splitlines()], args.network))


def sensitivity_table(lines: list[dict[str, Any]], network: str) -> str:
    """Return accuracy by stream for each mode, as Markdown."""
    found = {tuple(line["run"][1:4]): line for line in lines if line["run"][0] == network}
    rows = [["source", *(f"{found[stream, 'tent', 'on']['source']}" for stream in VARIED_ON)]]
    modes = ("off", "on", *one_changed())
    rows += [[f"`{mode}`", *(f"{found[stream, 'tent', mode]['accuracy']}" for stream in VARIED_ON)] for mode in modes]
    head = [["guard", *VARIED_ON], ["---", *["---:"] * len(VARIED_ON)]]
    return "\n".join("| " + " | ".join(row) + " |" for row in head + rows)


if __name__ == "__main__":
    main()
