"""Tiny data sets in all eight layouts, weights that fit them, and an experiment over all of them."""

from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from data.make import (
    make_cifar_c,
    make_domainnet126,
    make_imagenet_c,
    make_office_home,
    make_pacs,
    make_terra_incognita,
    make_vlcs,
)
from dpl.backbones import create
from dpl.bench import BenchContext, ExperimentGrid, GridRun, Store, Unit, read_grid
from dpl.bench.unit import resolved_settings

CLASSES = {"pacs": 7, "vlcs": 5, "office_home": 65, "terra_incognita": 10, "domainnet126": 6, "cifar10_c": 10,
           "cifar100_c": 100, "imagenet_c": 1000}  # fmt: skip
CORRUPTIONS = ("gaussian_noise", "fog")


def make_everything(root: Path) -> Path:
    """Write every layout below one folder, and random weights for each number of classes."""
    make_pacs(root)
    make_vlcs(root)
    make_office_home(root)
    make_terra_incognita(root)
    make_domainnet126(root)
    for classes in (10, 100):
        make_cifar_c(root, classes=classes, per_severity=24, corruptions=CORRUPTIONS)
    make_imagenet_c(root, corruptions=CORRUPTIONS)
    for dataset, classes in CLASSES.items():
        make_weights(root / "weights" / f"{dataset}.safetensors", classes)
    return root


def make_weights(path: Path, classes: int, seed: int = 0) -> Path:
    """Write a debug network's random weights; its head is made bold, so that confidences differ."""
    torch.manual_seed(seed)
    network = create("debug_cnn", num_classes=classes)
    network.fc.weight.data.mul_(20)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), path)
    return path


def everything_file(folder: Path, methods=("source", "dpl")) -> Path:
    """Write an experiment over all eight layouts."""
    common = {"network": "debug_cnn", "weights": "{weights}/{dataset}.safetensors", "batch_size": 8, "seeds": [3]}
    by_domain = [
        {"dataset": "pacs", "protocol": "leave_one_domain_out", "targets": ["art_painting", "photo"]},
        {"dataset": "vlcs", "protocol": "leave_one_domain_out", "targets": ["SUN09", "voc2007"]},
        {"dataset": "office_home", "protocol": "leave_one_domain_out", "targets": "real_world"},
        {"dataset": "terra_incognita", "protocol": "leave_one_domain_out", "targets": ["location_46"]},
        {"dataset": "domainnet126", "protocol": "single_source", "sources": ["real", "sketch"], "targets": ["clipart"]},
    ]
    corrupted = [
        {"dataset": "cifar10_c", "protocol": "continual", "domains": list(CORRUPTIONS), "severities": [3, 5]},
        {"dataset": "cifar100_c", "protocol": "reset_each_shift", "domains": list(CORRUPTIONS)},
        {"dataset": "imagenet_c", "protocol": "mixed_domains", "domains": list(CORRUPTIONS)},
    ]
    settings = {"lr": "1e-3", "confidence": 0.2}
    content = {**common, "methods": list(methods), "settings": settings, "sections": by_domain + corrupted}
    return write_yaml(folder / "everything.yaml", content)


def write_yaml(path: Path, content: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def grid_of(file: Path, root: Path, limit: int | None = None) -> ExperimentGrid:
    return read_grid(file, BenchContext(root, root / "weights", file.parent), limit=limit)


def units_of(grid: ExperimentGrid) -> list[Unit]:
    """Return every unit that may have to run, each once."""
    return list({unit.key: unit for cell in grid.cells for unit in cell.units()}.values())


def context_of(root: Path, grid: ExperimentGrid, **options) -> BenchContext:
    return BenchContext(root, files=grid.files, **options)


def unit_of(root: Path, dataset: str, method: str = "source", **fields) -> tuple[Unit, BenchContext]:
    """Return a unit on one of the tiny sets, and a context in which it runs."""
    context = BenchContext(root, root / "weights", root, cache=root / "cache")
    digest = context.digest(root / "weights" / f"{dataset}.safetensors")
    settings = resolved_settings(method, fields.pop("settings", {}))
    fields = {"batch_size": 8, "seed": 0, "network": "debug_cnn", **fields}
    return Unit(dataset=dataset, method=method, weights=digest, settings=settings, **fields), context


TIMES = ("seconds_per_image", "peak_bytes")


def without_times(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def run_all(file: Path, root: Path, out: Path) -> tuple[ExperimentGrid, Store]:
    """Run an experiment in this process, undisturbed; return it with its results."""
    grid, store = grid_of(file, root), Store(out)
    assert GridRun(grid.cells, store, context_of(root, grid)).run() == {}
    return grid, store
