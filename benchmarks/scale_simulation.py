"""What a grid costs on 1, 8, 64 ... GPUs: its own units, in the order and with the dependencies of the Ray engine.

    python benchmarks/scale_simulation.py [configs/table1.yaml ...] [--gpus 1 8 64] [--tflops 10] [--store DIR ...]

No data set and no weights are needed. A method's cost is that of its updates in forward passes of its network,
measured on a CPU (the table below, or the stores given with --store); how fast a forward pass is on the GPU is an
assumption, --tflops. Everything printed scales with it but for the start of a unit and the loading of images.
"""

import argparse
import heapq
import tempfile
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from dpl.bench import BenchContext, Cell, Store, Unit, read_grid
from dpl.data.facts import DOMAIN_FOLDERS, DOMAINNET126_COUNTS

# Seconds of a batch in forward passes of the same network: medians over EfficientNet-Lite0 on PACS and ResNet-20 on
# CIFAR-10, one thread, of `dpl bench` runs (docs/results).
COST = {
    "source": 1.0, "norm": 1.1, "lame": 1.2, "t3a": 1.1, "tast": 1.2, "tent_prebn": 1.2, "pl": 3.0, "tent": 2.5,
    "eta": 2.4, "eata": 2.5, "shot": 3.3, "shot_im": 3.5, "cpl": 3.2, "deyo": 3.6, "rdumb": 3.2, "dpl_o": 3.7,
    "dpl_star": 3.6, "dpl": 4.0, "arcface": 3.8, "proxy_nca": 4.0, "tsd": 3.5, "tast_bn": 4.5, "roid": 3.8,
    "sar": 5.6, "swr_nsp": 6.3, "dpl_dagger": 5.5, "adacontrast": 8.0, "rotta": 8.9, "domainadaptor": 13.0,
    "note": 15.0, "rmt": 15.0, "petta": 25.0, "cotta": 50.0,
}  # fmt: skip
# Multiply-adds of a forward pass, in billions.
GMACS = {"resnet18": 1.8, "resnet50": 4.1, "vit_b16": 17.6, "mixer_b16": 12.6, "wrn28_10": 5.2, "resnext29": 1.1,
         "resnet56": 0.13}  # fmt: skip
IMAGES = {"cifar10_c": 10_000, "cifar100_c": 10_000, "imagenet_c": 5_000, "cifar10": 10_000, "cifar100": 10_000,
          "imagenet": 50_000}  # fmt: skip
FOLDERS = {"pacs": "pacs", "vlcs": "vlcs", "office_home": "officehome", "terra_incognita": "terraincognita"}


@dataclass(frozen=True)
class Machine:
    """What is assumed of the cluster, and what was measured of the engine."""

    tflops: float = 10.0  # of a forward pass, as reached and not as printed on the box
    loaded: float = 2000.0  # images that a GPU's share of the cores brings along in a second, decoded before
    unit_start: float = 1.0  # model from its weights, first batch
    node_start: float = 60.0  # processes, libraries, copy of the data
    driver: float = 0.02  # one unit handed out and committed; units wait for each other here

    def seconds(self, unit: Unit, costs: dict[str, float]) -> float:
        gmacs = next((value for name, value in GMACS.items() if name in unit.network), 4.1)
        method, plus, _ = unit.method.partition("+")
        steps = unit.settings.get("steps", 1) if costs[method] > 1.5 else 1
        passes = (costs[method] + (0.5 if plus else 0)) * steps
        each = max(passes * 2 * gmacs / (1000 * self.tflops), 1 / self.loaded)
        return self.unit_start + images_of(unit) * each


def images_of(unit: Unit) -> int:
    if unit.dataset in FOLDERS:
        counts = DOMAIN_FOLDERS[FOLDERS[unit.dataset]].counts
    elif unit.dataset == "domainnet126":
        counts = DOMAINNET126_COUNTS
    else:
        counts = dict.fromkeys(unit.domains, IMAGES[unit.dataset])
    share = {"inside": 1 - unit.holdout, "outside": unit.holdout}.get(unit.part, 1.0)
    streamed = sum(min(counts[name], unit.limit or counts[name]) for name in unit.domains)
    return round(share * streamed * max(1, len(unit.severities)) * (unit.visits or 1))


def cases_of(config: Path) -> list[Cell]:
    """Read an experiment file as if all its weights were there."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = Path(name)
        stub = root / "stub"
        stub.write_bytes(b"")
        for listed in ("imagenet_test_image_ids.txt", "imagenet_classes.txt"):
            (root / listed).write_bytes(b"")
        with patch("dpl.bench.grid._weights", lambda *_: stub):
            return list(read_grid(config, BenchContext(root, root, config.parent)).cells)


@dataclass(frozen=True)
class Run:
    """A simulated run."""

    gpus: int
    hours: float
    busy: float  # share of the GPUs' time inside units


def simulate(cases: list[Cell], gpus: int, machine: Machine, costs: dict[str, float]) -> Run:
    """Hand units out first come, first served; those for the target wait for all that judge their settings."""
    seconds = {unit.key: machine.seconds(unit, costs) for case in cases for unit in case.units()}
    waiting: dict[str, list[Cell]] = defaultdict(list)
    missing: list[set[str]] = []
    numbers = {id(case): number for number, case in enumerate(cases)}
    queue: list[str] = []
    seen: set[str] = set()
    for case in cases:
        judges = {unit.key for candidate in case.candidates for unit in candidate.validation}
        missing.append(judges)
        for key in judges or {unit.key for unit in targets_of(case)}:
            waiting[key].append(case)
            if key not in seen:
                seen.add(key)
                queue.append(key)
    free, running = [machine.node_start] * gpus, []
    driver = now = work = 0.0
    place = 0
    while place < len(queue) or running:
        while place < len(queue) and free:
            driver = max(driver, heapq.heappop(free), now) + machine.driver
            heapq.heappush(running, (driver + seconds[queue[place]], queue[place]))
            work += seconds[queue[place]]
            place += 1
        now, key = heapq.heappop(running)
        heapq.heappush(free, now)
        for case in waiting[key]:
            left = missing[numbers[id(case)]]
            left.discard(key)
            if not left:
                more = [unit.key for unit in targets_of(case) if unit.key not in seen]
                seen.update(more)
                queue += more
    return Run(gpus, now / 3600, work / (now * gpus))


def targets_of(case: Cell) -> list[Unit]:
    """Return the units on the target: one candidate's, or with the oracle all."""
    candidates = case.candidates if case.oracle else case.candidates[:1]
    return [candidate.target for candidate in candidates]


def longest_chain(cases: list[Cell], machine: Machine, costs: dict[str, float]) -> tuple[float, str]:
    """Return the time that no number of GPUs can shorten, and the case that needs it."""

    def chain(case: Cell) -> float:
        judges = [machine.seconds(unit, costs) for candidate in case.candidates for unit in candidate.validation]
        return max(judges, default=0.0) + max(machine.seconds(unit, costs) for unit in targets_of(case))

    worst = max(cases, key=chain)
    return chain(worst) / 3600, f"{worst.label} on {worst.section}"


def costs_from(stores: list[Path]) -> dict[str, float]:
    """Return each method's cost in passes of the source model, as stored runs measured it."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for path in stores:
        times: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in Store(path).rows():
            if row["settings"].get("steps", 1) == 1:
                times[row["network"], row["dataset"]][row["method"]].append(row["seconds_per_image"])
        for methods in times.values():
            for method, found in methods.items() if "source" in methods else ():
                ratios[method].append(median(found) / median(methods["source"]))
    return COST | {method: median(found) for method, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--tflops", type=float, default=Machine.tflops)
    parser.add_argument("--store", nargs="*", type=Path, default=[])
    args = parser.parse_args()
    shipped = sorted((Path(__file__).parents[1] / "src/dpl/configs").glob("table[0-9].yaml"))
    machine, costs = Machine(tflops=args.tflops), costs_from(args.store)
    print("| experiment | units | images | longest chain |" + "".join(f" {n} GPU |" for n in args.gpus))
    print("| --- " + "| ---: " * (3 + len(args.gpus)) + "|")
    everything: list[Cell] = []
    files = args.configs or shipped
    for config in files:
        everything += (cases := cases_of(config))
        print_line(config.stem, cases, args.gpus, machine, costs)
    if len(files) > 1:
        print_line("all together", everything, args.gpus, machine, costs)


def print_line(name: str, cases: list[Cell], gpus: list[int], machine: Machine, costs: dict[str, float]) -> None:
    needed = {u.key: u for case in cases for c in case.candidates for u in c.validation}
    needed |= {unit.key: unit for case in cases for unit in targets_of(case)}
    hours, where = longest_chain(cases, machine, costs)
    runs = [simulate(cases, count, machine, costs) for count in gpus]
    cells = "".join(f" {run.hours:.2f} h ({run.busy:.0%}) |" for run in runs)
    images = sum(map(images_of, needed.values())) / 1e6
    print(f"| {name} | {len(needed):,} | {images:.1f} M | {hours:.2f} h ({where}) |{cells}", flush=True)


if __name__ == "__main__":
    main()
