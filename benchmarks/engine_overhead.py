"""What the Ray engine costs beside the runs themselves: one slot, units of about ten seconds.

    python benchmarks/engine_overhead.py [--units 12] [--seconds 10]

The serial engine runs the same units for comparison; the difference is the start of a process that loads PyTorch.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
import torch
import yaml
from safetensors.torch import save_file

from dpl.backbones import create
from dpl.bench import BenchContext, ExperimentGrid, GridRun, Store, read_grid
from dpl.bench.cluster import ClusterOptions, run_on_ray
from dpl.data.facts import CORRUPTIONS

IMAGES = 256  # at each severity


def make_data(root: Path, names: tuple[str, ...]) -> None:
    folder = root / "CIFAR-10-C"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    np.save(folder / "labels.npy", np.tile(np.arange(IMAGES) % 10, 5))
    for name in names:
        np.save(folder / f"{name}.npy", draw.integers(0, 256, (5 * IMAGES, 32, 32, 3), dtype=np.uint8))
    torch.manual_seed(0)
    (root / "weights").mkdir()
    save_file(create("debug_cnn", num_classes=10).state_dict(), root / "weights" / "cifar10_c.safetensors")


def make_grid(root: Path, names: tuple[str, ...], steps: int) -> ExperimentGrid:
    content = {
        "dataset": "cifar10_c", "protocol": "reset_each_shift", "domains": list(names), "network": "debug_cnn",
        "weights": "{weights}/{dataset}.safetensors", "batch_size": 64, "seeds": [0],
        "methods": {"tent": {"steps": steps}},
    }  # fmt: skip
    file = root / f"grid{steps}.yaml"
    file.write_text(yaml.safe_dump(content))
    return read_grid(file, BenchContext(root, root / "weights", root))


def steps_for(root: Path, seconds: float) -> int:
    """Return the number of steps with which a unit lasts about so long."""
    grid = make_grid(root, CORRUPTIONS[:1], 20)
    context = BenchContext(root, files=grid.files)
    GridRun(grid.cells, Store(root / "warm"), context).run()
    start = time.perf_counter()
    GridRun(grid.cells, Store(root / "calibration"), context).run()
    return max(1, round(20 * seconds / (time.perf_counter() - start)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="dpl-overhead-"))
    names = tuple(CORRUPTIONS[: args.units])
    make_data(root, names)
    grid = make_grid(root, names, steps_for(root, args.seconds))
    context = BenchContext(root, files=grid.files)
    start = time.perf_counter()
    GridRun(grid.cells, Store(root / "serial"), context).run()
    serial = time.perf_counter() - start
    start = time.perf_counter()
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    started = time.perf_counter() - start
    start = time.perf_counter()
    run_on_ray(GridRun(grid.cells, Store(root / "ray"), context), ClusterOptions(cpus=1))
    on_ray = time.perf_counter() - start
    result = {"units": len(grid.cells), "serial_seconds": serial, "start_seconds": started, "ray_seconds": on_ray}
    ray.shutdown()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
