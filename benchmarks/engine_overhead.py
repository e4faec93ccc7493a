"""What the Ray engine costs beside the runs themselves: one slot, units of about ten seconds.

    python benchmarks/engine_overhead.py [--units 12] [--seconds 10]

The serial engine runs the same units for comparison. On a machine that does other work too, the two differ by more
than what is measured here; so the engine's share is taken from one run alone: the time in which the slot was not
inside a unit, by Ray's own clock, and the time until the first unit began.
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
from dpl.bench import BenchContext, ExperimentGrid, Store, read_grid, run_cells
from dpl.bench.cluster import ClusterOptions, run_on_ray
from dpl.bench.engine import GridRun
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
    run_cells(grid.cells, Store(root / "warm"), context)
    start = time.perf_counter()
    run_cells(grid.cells, Store(root / "calibration"), context)
    return max(1, round(20 * seconds / (time.perf_counter() - start)))


def executions() -> list[tuple[float, float]]:
    """Return begin and end of every run of a unit, in seconds by Ray's clock."""
    time.sleep(3)  # workers tell what they did with some delay
    tasks = [event for event in ray.timeline() if event.get("cat") == "task:execute"]
    found = [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in tasks]
    return sorted(span for span in found if span[1] - span[0] > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--no-serial", action="store_true", help="leave out the serial engine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="dpl-overhead-"))
    names = tuple(CORRUPTIONS[: args.units])
    make_data(root, names)
    grid = make_grid(root, names, steps_for(root, args.seconds))
    context = BenchContext(root, files=grid.files)
    result: dict[str, float] = {"units": len(grid.units())}
    if not args.no_serial:
        start = time.perf_counter()
        run_cells(grid.cells, Store(root / "serial"), context)
        result["serial_seconds"] = time.perf_counter() - start
    start = time.time()
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    result["cluster_start_seconds"] = time.time() - start
    start = time.time()
    run_on_ray(GridRun(grid.cells, Store(root / "ray"), context), ClusterOptions(cpus=1))
    end = time.time()
    spans = executions()
    busy = sum(stop - begin for begin, stop in spans)
    result |= {
        "ray_seconds": end - start,
        "seconds_per_unit": busy / len(spans),
        "until_first_unit_seconds": spans[0][0] - start,
        "between_units_seconds": (end - spans[0][0] - busy) / len(spans),
        "overhead_percent": 100 * (end - spans[0][0] - busy) / busy,
        "overhead_with_start_percent": 100 * (end - start - busy) / busy,
    }
    ray.shutdown()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
