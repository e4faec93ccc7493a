"""Gain over cost: accuracy from the runs of configs/budget.yaml, cost measured here, in turns.

dpl bench configs/budget.yaml --data DATA --weights WEIGHTS --out RUNS
python benchmarks/budget.py --data DATA --weights WEIGHTS --out RUNS [--picture budget.png]
"""

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpl.allocator import keep_freed_memory
from dpl.bench import Context, Store
from dpl.bench.grid import Case, Places, read_grid
from dpl.bench.images import open_parts, segment_batches
from dpl.streams import plan

BATCHES, ROUNDS = 8, 10


def main() -> None:
    """Print one line for each entry of the file: accuracy, gain, cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--file", type=Path, default=Path("configs/budget.yaml"))
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    grid = read_grid(args.file, Places(args.data, args.weights, args.file.parent))
    context = Context(args.data, grid.files, cache=args.out / "cache")
    store = Store(args.out)
    cases = [case for case in grid.cases if store.done(case.candidates[0].target)]
    costs = measure(cases, context)
    rows = [row(case, store, cost) for case, cost in zip(cases, costs, strict=True)]
    source = next(r for r in rows if r["method"] == "source")
    for r in rows:
        r |= {"gain": r["accuracy"] - source["accuracy"], "times source": r["ms"] / source["ms"]}
        print(f"{r['label']:22s} {r['accuracy']:5.1f} % {r['gain']:+5.1f}  {r['times source']:5.2f} x source")
    if args.picture:
        draw(rows, args.picture)


def measure(cases: Sequence[Case], context: Context) -> list[float]:
    """Return the best milliseconds per image of each case over the first batches of its stream."""
    images = first_batches(cases[0], context)
    models = [
        context.prepared(c.candidates[0].target, open_parts(c.candidates[0].target, context)).model for c in cases
    ]
    best = [float("inf")] * len(models)
    for _ in range(ROUNDS):
        for number, model in enumerate(models):
            model.reset()
            begun = time.perf_counter()
            for batch in images:
                model(batch)
            best[number] = min(best[number], time.perf_counter() - begun)
    return [1e3 * seconds / sum(map(len, images)) for seconds in best]


def first_batches(case: Case, context: Context) -> list[Tensor]:
    """Return the images of the first batches of a stream."""
    unit = case.candidates[0].target
    parts = open_parts(unit, context)
    segment = plan(unit.protocol, [part.domain for part in parts], seed=unit.seed)[0]
    batches = islice(segment_batches(segment, parts, unit, context), BATCHES)
    return [batch.images.contiguous(memory_format=torch.channels_last) for batch in batches]


def row(case: Case, store: Store, cost: float) -> dict[str, Any]:
    """Return what one case reached and cost."""
    unit = case.candidates[0].target
    return {"label": case.label, "method": unit.method, "accuracy": store.records(unit)[0]["accuracy"], "ms": cost}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw gain over cost."""
    from dpl.extras import optional

    plt = optional("matplotlib.pyplot", "bench")
    figure, axis = plt.subplots(figsize=(6.4, 4), constrained_layout=True)
    for method, mark in (("source", "s"), ("norm", "D"), ("tent", "^"), ("dpl", "o")):
        own = [r for r in rows if r["method"] == method]
        axis.scatter([r["times source"] for r in own], [r["accuracy"] for r in own], marker=mark, label=method)
    for r in rows:
        axis.annotate(
            r["label"], (r["times source"], r["accuracy"]), fontsize=6, xytext=(3, 3), textcoords="offset points"
        )
    axis.axvline(1.5, color="0.7", linewidth=0.8)
    axis.set(xlabel="cost, times source inference", ylabel="accuracy, %")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
