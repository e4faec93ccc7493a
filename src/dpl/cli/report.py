"""`dpl report`: one page that shows a run."""

import argparse
import webbrowser
from pathlib import Path

from dpl.cli.console import print_json
from dpl.core.errors import SettingError
from dpl.core.extras import optional


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                        help="the --out of dpl bench (a folder) or of dpl adapt (a .csv, or its folder)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="the page to write (default: RUN/report.html; of several runs ./report.html)")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help="folder of the images, to show some (default: where the run read them)")  # fmt: skip
    for name, kind in (("latex", "LaTeX (.tex)"), ("csv", "CSV"), ("png", "a picture")):
        meaning = f"also write the accuracies beside the page, as {kind}"
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page, and print where it is."""
    for library in ("pandas", "jinja2"):
        optional(library, "bench")
    from dpl.report import default_output, read_runs, write_report, write_tables

    if args.data is not None and not args.data.is_dir():
        raise SettingError(f"--data {args.data}: there is no such folder")
    found = [run for path in args.runs for run in read_runs(path, args.data)]
    page = write_report(found, args.out or default_output(args.runs))
    tables = write_tables(found, page, [name for name in ("latex", "csv", "png") if getattr(args, name)])
    if args.json:
        facts = [{"name": r.name, "status": r.status, "whole": r.whole, "problems": len(r.problems)} for r in found]
        print_json({"page": str(page), "bytes": page.stat().st_size, "tables": [*map(str, tables)], "runs": facts})
    else:
        for run in found:
            more = len(run.problems) - 5
            left = [f"- and {more} more; the page has them all"] if more > 0 else []
            print(f"{run.name}: {run.status}", *(item.lines() for item in run.problems[:5]), *left, sep="\n")
        print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", *tables, sep="\n")
    if args.open:
        webbrowser.open(page.resolve().as_uri())
    return 0
