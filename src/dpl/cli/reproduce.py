"""`dpl reproduce`: a table of the paper, measured beside reported, or one of its figures."""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dpl.cli.bench import watched
from dpl.cli.console import print_json, print_table, warn
from dpl.cli.models import count, read_settings
from dpl.core.errors import SettingError
from dpl.core.extras import optional

if TYPE_CHECKING:  # these need the bench extra, the help does not
    from dpl.reproduce.compare import Column
    from dpl.reproduce.paper import Figure
    from dpl.reproduce.plan import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", metavar="WHAT", help="table1 ... table8, supervised, fig1 ... fig5")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the data sets; not needed with --no-run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for tables and figures")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="folder of source weights (default: DATA/weights)")
    parser.add_argument("--store", type=Path, metavar="DIR", help="folder of results; runs resume there (OUT/runs)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="another experiment file than the table's own")
    parser.add_argument("--limit", type=count, metavar="N", help="use at most N images of each domain")
    parser.add_argument("--seeds", type=count, metavar="N", help="number of seeds (default: the experiment file's)")
    parser.add_argument("--quick", action="store_true", help="one seed, a few batches of each stream, no search")
    parser.add_argument("--no-run", action="store_true", help="run nothing: show what the store has")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads")


def run(args: argparse.Namespace) -> int:
    """Run what is missing, write the files and print the table; return 1 where a run failed."""
    if args.data is None and not args.no_run:
        raise SettingError("--data DIR: missing; leave it out with --no-run only")
    if args.threads:
        torch.set_num_threads(args.threads)
    for library in ("pandas", "jinja2"):
        optional(library, "bench")
    from dpl.reproduce.plan import Request
    from dpl.reproduce.targets import find_target

    make, data = find_target(args.what), args.data or Path("data")
    folders = {"data": data, "weights": args.weights or data / "weights", "store": args.store or args.out / "runs"}
    told = {"watch": partial(watched, quiet=args.json), "say": warn, "command": args.typed}
    result = make(read_settings(args, Request, run=not args.no_run, **folders, **told))
    _print(result, args)
    return 1 if result.failed else 0


def _print(result: "Result", args: argparse.Namespace) -> None:
    document = result.document
    if args.json:
        facts = {"files": [str(path) for path in result.files], "failed": result.failed}
        print_json({"what": args.what, **facts, "document": dataclasses.asdict(document)})
        return
    if document.caution:
        print(document.caution)
    for grid in document.grids:
        headers = ["method", "", *(column.name for column in grid.columns)]
        rows = [[name, kind, *map(_plain, grid.columns, figures)] for name, _, kind, figures in grid.lines()]
        print_table(headers, rows, f"{grid.title} ({grid.metric} in percent)")
        print()
    if document.differences:
        print("What differs from the paper:", *(f"- {text}" for text in document.differences), sep="\n")
    if result.missing:
        print("What is missing:", *(item.lines() for item in result.missing), sep="\n")
    print(*result.files, sep="\n")


def _plain(column: "Column", figure: "Figure | None") -> str:
    """Return a figure with `*` for the best and `+` for the second best."""
    if figure is None:
        return "-"
    mark = {1: "*", 2: "+"}.get(figure.rank or 0, "")
    deviation = "" if figure.deviation is None else f" ±{figure.deviation:.2f}"
    scope = column.scope(figure)
    return f"{column.text(figure)}{mark}{deviation}" + (f" ({scope})" if scope else "")
