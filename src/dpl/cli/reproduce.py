"""`dpl reproduce`: a table of the paper, measured beside reported, or one of its figures."""

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dpl.cli.console import print_json, print_table, warn
from dpl.cli.models import check_counts
from dpl.cli.progress import watched
from dpl.core.errors import SettingError

if TYPE_CHECKING:  # these need the bench extra, the help does not
    from dpl.reproduce.compare import CellText, ComparisonTable
    from dpl.reproduce.document import Item
    from dpl.reproduce.targets import Request, Result

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", metavar="WHAT", help="table1 ... table8, supervised, fig1 ... fig5")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the data sets; not needed with --no-run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for tables and figures")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="folder of source weights (default: DATA/weights)")
    parser.add_argument("--store", type=Path, metavar="DIR", help="folder of results; runs resume there (OUT/runs)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="another experiment file than the table's own")
    parser.add_argument("--limit", type=int, metavar="N", help="use at most N images of each domain")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the experiment file's)")
    parser.add_argument("--quick", action="store_true", help="one seed, a few batches of each stream, no search")
    parser.add_argument("--no-run", action="store_true", help="run nothing: show what the store has")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")


def run(args: argparse.Namespace) -> int:
    """Run what is missing, write the files and print the table; return 1 where a run failed."""
    from dpl.reproduce.targets import find_target

    check_counts(args, "limit", "seeds", "threads")
    if args.data is None and not args.no_run:
        raise SettingError("--data DIR: missing; leave it out with --no-run only")
    result = find_target(args.what).make(_request(args))
    if args.json:
        _print_json(args.what, result)
    else:
        _print(result)
    return 1 if result.failed else 0


def _request(args: argparse.Namespace) -> "Request":
    from dpl.reproduce.targets import Request

    if args.threads:
        torch.set_num_threads(args.threads)
    data = args.data or Path("data")
    return Request(
        data=data,
        weights=args.weights or data / "weights",
        out=args.out,
        store=args.store or args.out / "runs",
        config=args.config,
        limit=args.limit,
        seeds=args.seeds,
        quick=args.quick,
        run=not args.no_run,
        watch=partial(watched, quiet=args.json),
        say=warn,
        command=_command(args),
    )


def _command(args: argparse.Namespace) -> str:
    """Return the command as it would be typed, all that changes figures included."""
    words = ["dpl", "reproduce", args.what]
    for name in ("data", "weights", "store", "config", "limit", "seeds", "out"):
        value = getattr(args, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join([*words, *(f"--{name.replace('_', '-')}" for name in ("quick", "no_run") if getattr(args, name))])


def _print_json(what: str, result: "Result") -> None:
    document = None if result.document is None else result.document.record()
    files = [str(path) for path in result.files]
    print_json({"what": what, "files": files, "failed": result.failed, "document": document})


def _print(result: "Result") -> None:
    if result.document is not None:
        if result.document.caution:
            print(result.document.caution)
        for grid in result.document.grids:
            _print_grid(grid)
        _print_lists(result.document.differences, result.missing)
    for path in result.files:
        print(path)


def _print_grid(grid: "ComparisonTable") -> None:
    headers = ["method", "", *(column.name for column in grid.columns)]
    rows = []
    for row in grid.rows:
        measured, reported = grid.texts(row)
        rows.append([row.name, "measured", *map(_plain, measured)])
        rows += [["", "reported", *map(_plain, reported)]] if row.printed else []
    print_table(headers, rows, f"{grid.title} ({grid.metric} in percent)")
    print()


def _plain(text: "CellText | None") -> str:
    """Return a figure with `*` for the best and `+` for the second best."""
    if text is None:
        return "-"
    mark = {1: "*", 2: "+"}.get(text.rank or 0, "")
    deviation = f" ±{text.deviation}" if text.deviation else ""
    return f"{text.figure}{mark}{deviation}" + (f" ({text.coverage})" if text.coverage else "")


def _print_lists(differences: Sequence[str], missing: "Sequence[Item]") -> None:
    if differences:
        print("What differs from the paper:")
    for text in differences:
        print(f"- {text}")
    if missing:
        print("What is missing:")
    for item in missing:
        print(item.lines())
