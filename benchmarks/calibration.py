"""The study behind DPL's defaults: every setting of configs/calibration.yaml on source images, as Markdown tables.

    python benchmarks/calibration.py --data DATA --weights WEIGHTS --out RUNS [--section shift] [--no-run]

In a section with candidates only their validation on held-out source images is run, never the target.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import torch

from dpl.bench import BenchContext, Candidate, Cell, GridRun, Store, read_grid
from dpl.bench.store import complete

CONFIG = Path(__file__).parents[1] / "src/dpl/configs" / "calibration.yaml"
SHOWN = {"temperature": "tau", "momentum": "eta", "reg_weight": "beta", "memory_grad": "memory_grad"}


def main() -> None:
    """Run what is missing and print one table for each section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("data", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--section")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--no-run", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid = read_grid(args.config, BenchContext(args.data, args.weights, args.config.parent))
    cases = [single for case in grid.cells if args.section in (None, case.section) for single in without_target(case)]
    cases.sort(key=lambda case: case.seed)  # all settings with one seed before the next seed
    store = Store(args.out)
    if not args.no_run:
        failed = GridRun(cases, store, BenchContext(args.data, files=grid.files, decoded=args.cache), tell).run()
        print("".join(f"failed: {reason}\n" for reason in failed.values()))
    for section in dict.fromkeys(case.section for case in cases):
        print(table([case for case in cases if case.section == section and complete(case, store)], store))


def tell(event) -> None:
    """Print a line for each unit that ended."""
    if event.ended:
        print(f"{event.unit.title}: {event.accuracy:.1f} % in {event.seconds:.0f} s {event.error or ''}", flush=True)


def without_target(case: Cell) -> list[Cell]:
    """Return a case as it is, or one for each validation run of its candidates."""
    if len(case.candidates) == 1:
        return [case]
    return [
        Cell(case.section, case.label, case.seed, (Candidate(candidate.values, unit),))
        for candidate in case.candidates
        for unit in candidate.validation
    ]


def table(cases: list[Cell], store: Store) -> str:
    """Return rows of settings, columns of streams; the mean is over streams of means over seeds."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for case in cases:
        unit = case.candidates[0].target
        stream = f"{'+'.join(unit.trained_on)} -> {unit.domains[0]}" if unit.part == "whole" else unit.domains[0]
        found[described(unit)][stream][unit.seed] = store.records(unit)[0]["accuracy"]
    streams = list(dict.fromkeys(stream for row in found.values() for stream in row))
    lines = [f"| {cases[0].section} | {' | '.join(streams)} | mean | seeds |", "|---" * (len(streams) + 3) + "|"]
    for name, row in found.items():
        values = [fmean(row[stream].values()) if stream in row else float("nan") for stream in streams]
        seeds = sorted({seed for by_seed in row.values() for seed in by_seed})
        figures = " | ".join(f"{value:.1f}" for value in (*values, fmean(values)))
        lines.append(f"| {name} | {figures} | {', '.join(map(str, seeds))} |")
    return "\n".join(lines) + "\n"


def described(unit) -> str:
    """Return the settings under study."""
    if unit.method == "source":
        return "source"
    return ", ".join(f"{short} {unit.settings[name]}" for name, short in SHOWN.items())


if __name__ == "__main__":
    main()
