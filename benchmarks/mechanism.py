"""What the paper's explanation predicts, measured: label noise, separation of features, styles, training with labels.

python benchmarks/mechanism.py noise --data DATA --weights W --out docs/results/data/mechanism.csv
python benchmarks/mechanism.py separation --data DATA --weights W --out docs/results/data/mechanism.csv
python benchmarks/mechanism.py styles --data DATA --weights W --out docs/results/data/mechanism.csv
python benchmarks/mechanism.py supervised --data CIFAR --out docs/results/data/mechanism.csv

A run that is in the file is not repeated. Source models and streams are those of claims_pacs.yaml.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dpl.bench import BenchContext, Unit, read_grid, run_unit
from dpl.bench.images import UnitStream
from dpl.bench.unit import resolved_settings
from dpl.model.adaptive import AdaptiveModel
from dpl.network.style_layer import at_layer, find_style_layer
from dpl.objectives import confident_labels, style_statistics
from dpl.reproduce.embeddings import nearest_distance
from dpl.training.supervised import SupervisedSpec, train_supervised

CONFIG = Path(__file__).parents[1] / "src/dpl/configs/claims_pacs.yaml"
COLUMNS = ("row", "target", "seed", "measure", "value")
NOISE, NOISE_TARGETS, NOISE_IMAGES = (0.0, 0.2, 0.4, 0.6), ("sketch", "art_painting"), 640
SUPERVISED = {"network": "cifar_resnet20", "epochs": 5, "limit": 4000}
Values = dict[str, float]
Job = tuple[str, str, int, Callable[[], Values]]


def image_batches(unit: Unit, context: BenchContext) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and labels of a unit in their order of arrival."""
    stream = UnitStream(unit, context)
    for segment in stream.segments:
        for batch in stream.batches(segment):
            yield batch.images.contiguous(memory_format=torch.channels_last), batch.labels


def with_method(unit: Unit, method: str, **settings: Any) -> Unit:
    """Return a unit with another method, all its other settings at their defaults."""
    return replace(unit, method=method, settings=resolved_settings(method, {"seed": unit.seed, **settings}))


def adapt_to_noise(unit: Unit, context: BenchContext, share: float) -> Values:
    """Let the loss see true labels of the confident samples, a share of them flipped to a random other class."""
    model = context.prepared(UnitStream(unit, context))
    random = np.random.default_rng(unit.seed)  # for every share the same draws: more noise flips more of the same
    given = torch.empty(0)

    def labels_of(logits: Tensor, confidence: float) -> Tensor:
        return torch.where(confident_labels(logits, confidence) >= 0, given, -1)

    right: list[Tensor] = []
    with patch("dpl.methods.pl.confident_labels", labels_of), patch("dpl.methods.dpl.confident_labels", labels_of):
        for images, labels in image_batches(unit, context):
            flipped = torch.from_numpy(random.random(len(labels)) < share)
            other = (labels + torch.from_numpy(random.integers(1, 7, len(labels)))) % 7
            given = torch.where(flipped, other, labels)
            right.append(model(images).argmax(dim=1) == labels)
    return {"accuracy": 100 * float(torch.cat(right).float().mean())}


@torch.no_grad()
def held_out(unit: Unit, context: BenchContext, model: AdaptiveModel) -> Values:
    """Return what the model that has seen the stream makes of the fifth of its domain that was not streamed."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for images, labels in image_batches(replace(unit, part="outside", limit=None), context):
        out = model.method.network(images)
        found.append((out.logits, out.z, labels))
    logits, features, labels = (torch.cat(column) for column in zip(*found, strict=True))
    return {
        "held-out accuracy": 100 * float((logits.argmax(dim=1) == labels).float().mean()),
        "held-out log-loss": float(cross_entropy(logits.float(), labels)),
        "separation": 100 * scatter_ratio(normalize(features.float(), dim=1), labels),
    }


def scatter_ratio(features: Tensor, labels: Tensor) -> float:
    """Return the scatter between the class means over the scatter within the classes."""
    classes = labels.unique()
    means = torch.stack([features[labels == k].mean(dim=0) for k in classes])
    sizes = torch.stack([(labels == k).sum() for k in classes])
    between = (sizes[:, None] * (means - features.mean(dim=0)).square()).sum()
    within = (features - means[torch.searchsorted(classes, labels)]).square().sum()
    return float(between / within)


def separation(unit: Unit, context: BenchContext) -> Values:
    """Adapt to the whole stream, then look at the held-out images."""
    model = context.prepared(UnitStream(unit, context))
    run_unit(unit, context)  # adapts this very model, which the context keeps
    return held_out(unit, context, model)


@torch.no_grad()
def styles(unit: Unit, context: BenchContext) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the style of each image in the source network (Eq. 8 and 9), and the network's confidence."""
    network = context.prepared(UnitStream(unit, context)).method.network
    found, sure = list[Tensor](), list[Tensor]()

    def record(maps: Tensor) -> Tensor:
        found.append(torch.cat([part.flatten(1) for part in style_statistics(maps)], dim=1).float())
        return maps

    with at_layer(network.module, find_style_layer(network.module), record):
        for images, _ in image_batches(unit, context):
            sure.append(network(images).probabilities.max(dim=1).values)
    return torch.cat(found).numpy(), torch.cat(sure).numpy()


def style_distance(unit: Unit, context: BenchContext) -> Values:
    """Return how often an unconfident image is farther from the source styles than a confident one, minus 50 %."""
    sources = [
        styles(replace(unit, domains=(name,), part="outside", limit=300), context)[0] for name in unit.trained_on
    ]
    source, (target, sure) = np.concatenate(sources), styles(replace(unit, limit=NOISE_IMAGES), context)
    mean, deviation = source.mean(axis=0), source.std(axis=0) + 1e-6
    far = nearest_distance((target - mean) / deviation, (source - mean) / deviation)
    farther = (far[sure <= 0.9][:, None] > far[sure > 0.9]).mean()
    return {"farther": 100 * float(farther) - 50, "confident": 100 * float((sure > 0.9).mean())}


def supervised(loss: str, seed: int, data: Path) -> Values:
    """Train with true labels."""
    with TemporaryDirectory() as out:
        *_, last = train_supervised(SupervisedSpec(loss=loss, seed=seed, **SUPERVISED), data=data, out=out)  # type: ignore[arg-type]
    return {"accuracy": last["accuracy"], "cosine accuracy": last["cosine_accuracy"]}


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield row, target, seed and what is to be run."""
    if args.part == "supervised":
        for seed, loss in product(range(3), ("ce", "dpl")):
            yield f"supervised {loss}", "cifar10", seed, lambda loss=loss, seed=seed: supervised(loss, seed, args.data)  # type: ignore[misc]
        return
    grid = read_grid(CONFIG, BenchContext(args.data, args.weights, CONFIG.parent))
    context = BenchContext(args.data, files=grid.files, decoded=args.cache)
    sources = [cell.candidates[0].target for cell in grid.cells if cell.label == "source"]
    for unit in sources:
        target = unit.domains[0]
        if args.part == "styles":
            yield "styles", target, unit.seed, lambda unit=unit: style_distance(unit, context)  # type: ignore[misc]
        elif args.part == "separation":
            for method in ("source", "pl", "dpl"):
                run = with_method(unit, method, **({} if method == "source" else {"lr": 5e-5}))
                yield f"after {method}", target, unit.seed, lambda run=run: separation(run, context)  # type: ignore[misc]
        elif target in NOISE_TARGETS:
            for method, share in product(("pl", "dpl_star"), NOISE):
                run = with_method(replace(unit, limit=NOISE_IMAGES), method, lr=5e-5, second_pass="never")
                yield (f"noise {share:.0%} {method}", target, unit.seed,
                       lambda run=run, share=share: adapt_to_noise(run, context, share))  # type: ignore[misc]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("noise", "separation", "styles", "supervised"))
    for name in ("data", "weights", "out", "cache"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    new = not args.out.exists()
    kept = set() if new else {tuple(line[:3]) for line in csv.reader(args.out.open())}
    with args.out.open("a", newline="") as file:
        lines = csv.writer(file)
        if new:
            lines.writerow(COLUMNS)
        for row, target, seed, run in jobs(args):
            if (row, target, str(seed)) not in kept:
                lines.writerows((row, target, seed, name, round(value, 4)) for name, value in run().items())
                file.flush()


if __name__ == "__main__":
    main()
