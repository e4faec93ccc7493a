"""Which engine runs a grid: this process or a few, a Ray cluster, or jobs of a Slurm cluster."""

import argparse
from collections.abc import Sequence

import torch

from dpl.bench import BenchContext, Cell, Store, run_cells, run_in_processes
from dpl.bench.engine import OnProgress
from dpl.bench.ray import RayOptions, run_on_ray
from dpl.bench.slurm import SlurmOptions, run_on_slurm
from dpl.cli.models import parse_settings
from dpl.core.extras import choose_device

__all__ = ["add_engine_arguments", "run_with"]


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of all engines; docs/scale.md explains them."""
    group = parser.add_argument_group("engine", "where the runs take place (docs/scale.md)")
    group.add_argument("--engine", choices=("serial", "ray", "slurm"), default="serial",
                       help="serial: here; ray: on a Ray cluster; slurm: as jobs, --workers of them")  # fmt: skip
    group.add_argument("--device", help="cpu, cuda ... for engine serial (default: a GPU if there is one)")
    group.add_argument("--address", help="of a running Ray cluster: auto or HOST:PORT (default: a new one)")
    group.add_argument("--cpus-per-unit", type=float, metavar="N", help="cores of a run (default: --threads, or 1)")
    group.add_argument("--gpus-per-unit", type=float, metavar="N",
                       help="GPUs of a run, or a fraction (default: 1 if the Ray cluster has any, else 0)")  # fmt: skip
    group.add_argument("--memory-per-unit", type=float, metavar="GB", help="memory of a run (default: not counted)")
    group.add_argument("--retries", type=int, default=3, metavar="N",
                       help="how often a run whose process or node died is retried (default: %(default)s)")  # fmt: skip
    group.add_argument("--slurm", action="append", default=[], metavar="KEY=VALUE",
                       help="hours=, executor=local, or an option of sbatch such as partition=gpu")  # fmt: skip


def run_with(
    args: argparse.Namespace, cells: Sequence[Cell], store: Store, context: BenchContext, on_progress: OnProgress
) -> dict[str, str]:
    """Run the cells with the engine that was asked for; return the errors by the unit's key."""
    if args.engine == "serial":
        context.device = str(choose_device(args.device))
        if args.workers > 1:
            return run_in_processes(cells, store, context, args.workers, torch.get_num_threads(), on_progress)
        return run_cells(cells, store, context, on_progress)
    needs = {
        "cpus": args.cpus_per_unit or float(args.threads or 1), "gpus": args.gpus_per_unit,
        "memory_gb": args.memory_per_unit, "retries": args.retries,
    }  # fmt: skip
    if args.engine == "ray":
        return run_on_ray(cells, store, context, on_progress, RayOptions(address=args.address, **needs))
    extra = parse_settings(args.slurm, "--slurm", "partition=gpu", kinds=(int, float))
    known = {name: extra.pop(name) for name in ("hours", "executor") if name in extra}
    further = {f"slurm_{name}": value for name, value in extra.items()}
    options = SlurmOptions(jobs=args.workers, extra=further, **needs, **known)
    return run_on_slurm(cells, store, context, on_progress, options)
