"""`dpl bench`: run an experiment file, resume it, and print what was measured."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dpl.bench import BenchContext, Cell, ExperimentGrid, Store, UnitProgress, read_grid, run_in_processes
from dpl.bench.cluster import ClusterOptions, run_on_ray, run_on_slurm
from dpl.bench.engine import GridRun, OnProgress
from dpl.bench.images import check_data, check_networks
from dpl.bench.store import StoredRequest, runnable_units, write_request
from dpl.bench.tables import cell_rows, measured_tables
from dpl.cli.console import print_json, print_table, progress, warn
from dpl.cli.models import add_import_argument, add_settings, count, parse_settings, read_settings
from dpl.core.errors import SettingError, did_you_mean
from dpl.core.extras import choose_device, import_modules

# Keys of `--only`, with what a cell has of each.
_ONLY: dict[str, Callable[[Cell], set[str]]] = {
    "method": lambda cell: {cell.label},
    "target": lambda cell: set(cell.candidates[0].target.domains),
    "seed": lambda cell: {str(cell.seed)},
    "section": lambda cell: {cell.section},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, help="experiment file (YAML); docs/bench.md explains its keys")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results; runs resume there")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="folder of source weights (default: DATA/weights)")
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE,...",
                        help="run only these: method=, target=, seed= or section=; may be repeated")  # fmt: skip
    parser.add_argument("--limit", type=count, metavar="N", help="use at most N images of each domain")
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads of each process")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder for decoded images and corruptions made here")
    add_import_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, list the runs, run nothing")
    group = parser.add_argument_group("engine", "where the runs take place (docs/scale.md)")
    group.add_argument("--engine", choices=("serial", "ray", "slurm"), default="serial",
                       help="serial: here; ray: on a Ray cluster; slurm: as jobs, --workers of them")  # fmt: skip
    group.add_argument("--device", help="cpu, cuda ... for engine serial (default: a GPU if there is one)")
    group.add_argument("--cpus-per-unit", type=float, metavar="N", help="cores of a run (default: --threads, or 1)")
    add_settings(group, ClusterOptions, "cpus_per_unit", "jobs", "hours", "executor", "extra")
    group.add_argument("--slurm", action="append", default=[], metavar="KEY=VALUE",
                       help="hours=, executor=local, or an option of sbatch such as partition=gpu")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run what is missing and print the tables."""
    weights, cache = args.weights or args.data / "weights", args.cache or args.out / "cache"
    import_modules(args.imports)
    modules = tuple(args.imports)
    context = BenchContext(args.data, weights, args.file.parent, cache=cache, decoded=args.cache, modules=modules)
    grid = read_grid(args.file, context, limit=args.limit)
    cells = _chosen_cells(grid, args.only)
    store = Store(args.out)
    units = [unit for cell in cells for unit in cell.units()]
    for note in check_data(units, context):
        warn(f"note: {note}")
    check_networks(units, context)
    if args.dry_run:
        _print_plan(cells, store, args.json)
        return 0
    torch.set_num_threads(args.threads or max(1, torch.get_num_threads() // args.workers))
    write_request(store.root, StoredRequest(grid.title, str(args.data.resolve()), tuple(cells)))
    with watched(grid.title, cells, store, quiet=args.json) as on_progress:
        failed = _run_with(args, GridRun(cells, store, context, on_progress))
    rows = cell_rows(cells, store)
    if args.json:
        print_json({"title": grid.title, "rows": rows, "failed": failed})
        return int(bool(failed))
    for title, means in measured_tables(rows):
        figures = means.map(lambda value: "-" if value != value else f"{value:.1f}")
        print_table(["method", *means.columns], [[str(label), *line] for label, line in figures.iterrows()], title)
    for error in dict.fromkeys(failed.values()):
        warn(f"failed: {error}")
    return int(bool(failed))


@contextmanager
def watched(title: str, cells: Sequence[Cell], store: Store, quiet: bool) -> Iterator[OnProgress]:
    """Yield a function that takes the progress of units and shows it."""
    labels = {unit.key: cell.label for cell in cells for unit in cell.units()}  # several rows may need a unit: of one
    missing = {unit.key for cell in cells for unit in cell.units() if not store.done(unit)}
    total = len(missing)
    with progress(title, total, quiet) as advance:

        def on_progress(seen: UnitProgress) -> None:
            if seen.ended and seen.error is None:
                missing.discard(seen.unit.key)
            speed = f"{1000 * seen.seconds / max(seen.images, 1):.1f} ms/image"
            outcome = seen.error or f"{seen.accuracy:.1f} %, {speed}"
            advance(total - len(missing), f"{labels[seen.unit.key]} on {seen.unit.stream_title}: {outcome}")

        yield on_progress


def _chosen_cells(grid: ExperimentGrid, words: list[str]) -> list[Cell]:
    """Return the cells that fit every `--only`; a value that fits none is an error naming the nearest."""
    cells = list(grid.cells)
    for word in words:
        key, _, values = word.partition("=")
        if key not in _ONLY or not values:
            raise SettingError(f"--only {word}: expected KEY=VALUE with one of {', '.join(_ONLY)}")
        known = {value for cell in grid.cells for value in _ONLY[key](cell)}
        for value in (wanted := values.split(",")):
            if value not in known:
                raise SettingError(f"--only {word}: {value!r} is not in this file. {did_you_mean(value, known)}")
        cells = [cell for cell in cells if set(wanted) & _ONLY[key](cell)]
    if not cells:
        raise SettingError(f"--only {' '.join(words)}: no run fits all of these")
    return cells


def _run_with(args: argparse.Namespace, run: GridRun) -> dict[str, str]:
    """Run the cells with the engine that was asked for; return the errors by the unit's key."""
    if args.engine == "serial":
        run.context.device = str(choose_device(args.device))
        if args.workers > 1:
            return run_in_processes(run, args.workers, torch.get_num_threads())
        return run.run()
    extra = parse_settings(args.slurm, "--slurm", "partition=gpu", kinds=(int, float))
    known: dict[str, Any] = {name: extra.pop(name) for name in ("hours", "executor") if name in extra}
    known |= {"cpus_per_unit": args.cpus_per_unit or float(args.threads or 1), "jobs": args.workers}
    known["extra"] = {f"slurm_{name}": value for name, value in extra.items()}
    options = read_settings(args, ClusterOptions, **known)
    return (run_on_ray if args.engine == "ray" else run_on_slurm)(run, options)


def _print_plan(cells: list[Cell], store: Store, as_json: bool) -> None:
    headers = ["section", "method", "stream", "candidates", "to_run"]
    runs = [len(runnable_units(cell, store)) for cell in cells]
    rows = [
        [cell.section, cell.label, cell.candidates[0].target.stream_title, len(cell.candidates), to_run]
        for cell, to_run in zip(cells, runs, strict=True)
    ]
    if as_json:
        print_json([dict(zip(headers, row, strict=True)) for row in rows])
        return
    print_table(headers, [list(map(str, row)) for row in rows])
    print(f"\n{len(cells)} cells of the tables, {sum(runs)} runs can start now")
