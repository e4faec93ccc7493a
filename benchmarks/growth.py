"""How time and memory grow: with the batch, the classes, the image and the length of the stream.

python benchmarks/growth.py [--out growth.json] [--picture growth.png] [--quick]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed.networks import tell_apart
from torch import Tensor, nn

import dpl
from dpl.backbones.cifar import CifarResNet
from dpl.core.allocator import keep_freed_memory
from dpl.runs.costs import forget_peak, peak_memory

METHODS = ("source", "tent", "dpl", "t3a")
LONG = (
    "tent",
    "dpl",
    "dpl_dagger",
    "t3a",
    "tsd",
    "tast",
    "lame",
    "eta",
    "cotta",
    "rotta",
    "note",
    "adacontrast",
    "roid",
)
_STILL = 1e-9  # the same batch again and again would make all samples one class, which costs nothing
Points = dict[str, list[tuple[int, float, float]]]


def main() -> None:
    """Measure the four curves, print them, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("growth.json"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--batches", type=int, default=10_000, help="length of the long streams")
    parser.add_argument("--only", help="one of the curves; the others stay as they are in the file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the points, to see that it runs")
    args = parser.parse_args()
    keep_freed_memory()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name, measure in curves(args).items():
        if args.only in (None, name):
            found[name] = measure()
            args.out.write_text(json.dumps(found, indent=1))
    if args.picture:
        draw(found, args.picture)


def curves(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return what can be measured, by name."""
    thin = slice(None, None, 4) if args.quick else slice(None)
    batches, classes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512][thin], [10, 100, 1_000, 4_096, 10_000, 21_843][thin]
    sizes, length = [16, 32, 64, 96, 128, 192][thin], args.batches // (50 if args.quick else 1)
    return {
        "batch size": lambda: over(batches, lambda n: subject(images=n)),
        "classes": lambda: over(classes, lambda n: subject(classes=n)),
        "pixels a side": lambda: over(sizes, lambda n: subject(images=16, size=n)),
        "stream length": lambda: long_streams(length),
    }


def subject(images: int = 32, size: int = 32, classes: int = 10) -> tuple[nn.Module, Tensor]:
    """Return random images and a CIFAR ResNet-20 that tells them apart: a loss over one class would cost nothing."""
    torch.manual_seed(0)
    batch = torch.rand(images, 3, size, size)
    return tell_apart(CifarResNet(3, classes).eval(), batch), batch


def over(values: list[int], make: Callable[[int], tuple[nn.Module, Tensor]]) -> Points:
    """Return milliseconds per batch and peak megabytes of each method for each value."""
    points: Points = {method: [] for method in METHODS}
    for value in values:
        net, images = make(value)
        for method in METHODS:
            settings = {"lr": _STILL} if method in ("tent", "dpl") else {}
            settings |= {"confidence": 0.0} if method == "dpl" else {}
            model = dpl.adapt(net, method, **settings)
            model(images)
            forget_peak()
            before = peak_memory() or 0
            seconds = best(model, images)
            points[method].append((value, 1e3 * seconds, ((peak_memory() or 0) - before) / 2**20))
            print(f"{value:7d} {method:10s} {1e3 * seconds:9.1f} ms a batch", flush=True)
    return points


def best(model: dpl.AdaptiveModel, images: Tensor, patience: float = 1.0) -> float:
    """Return the seconds of the quickest step, of at least three and of as many as `patience` seconds allow."""
    found: list[float] = []
    while len(found) < 3 or sum(found) < patience:
        found.append(timed(model, images))
    return min(found)


def timed(model: dpl.AdaptiveModel, images: Tensor) -> float:
    """Return the seconds of one step."""
    begun = time.perf_counter()
    model(images)
    return time.perf_counter() - begun


def long_streams(batches: int) -> dict[str, list[tuple[int, float, float]]]:
    """Return resident memory (MB) and milliseconds per batch along a stream of ever new images."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for method in LONG:
        settings = {"confidence": 0.0} if method.startswith("dpl") else {"views": 1} if method == "cotta" else {}
        model, draw_images = dpl.adapt(net, method, **settings), torch.Generator().manual_seed(0)
        curves[method], begun = [], time.perf_counter()
        for number in range(1, batches + 1):
            model(torch.rand(8, 3, 12, 12, generator=draw_images))
            if number % max(batches // 10, 1) == 0:
                each = (time.perf_counter() - begun) / max(batches // 10, 1)
                curves[method].append((number, 1e3 * each, resident()))
                begun = time.perf_counter()
        grown = curves[method][-1][2] - curves[method][0][2]
        print(f"{method:12s} {batches} batches: {grown:+.1f} MB after the first tenth", flush=True)
    return curves


def resident() -> float:
    """Return the resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw one panel for each curve."""
    from dpl.core.extras import optional

    plt = optional("matplotlib.pyplot", "bench")
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), constrained_layout=True)
    for axis, name in zip(axes, ("batch size", "classes", "pixels a side", "stream length"), strict=True):
        points = found.get(name, {})
        memory = name == "stream length"
        for method, values in points.items():
            axis.plot([v[0] for v in values], [v[2 if memory else 1] for v in values], marker=".", label=method)
        axis.set(xlabel=name, ylabel="resident memory, MB" if memory else "ms a batch")
        if not memory:
            axis.set(xscale="log", yscale="log")
            axis.xaxis.set_minor_formatter("")
            axis.yaxis.set_minor_formatter("")
        axis.legend(
            fontsize=6 if memory else 8,
            ncols=2 if memory else 1,
            frameon=False,
            loc="center right" if memory else "best",
        )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
