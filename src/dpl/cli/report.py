"""`dpl report`: one page that shows a run."""

import argparse
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from dpl.cli.console import print_json, progress
from dpl.core.errors import SettingError
from dpl.core.extras import optional

if TYPE_CHECKING:
    from dpl.report import Run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                        help="the --out of dpl bench (a folder) or of dpl adapt (a .csv, or its folder)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="the page to write (default: RUN/report.html; of several runs ./report.html)")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help="folder of the images, to show some (default: where the run read them)")  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page, and print where it is."""
    for library in ("pandas", "jinja2"):
        optional(library, "bench")
    from dpl.report import default_output, read_runs, write_report

    if args.data is not None and not args.data.is_dir():
        raise SettingError(f"--data {args.data}: there is no such folder")
    found: list[Run] = []
    with progress("reading", len(args.runs), quiet=args.json or len(args.runs) < 2) as advance:
        for count, path in enumerate(args.runs, start=1):
            found += read_runs(path, args.data)
            advance(count, path.name)
    page = write_report(found, args.out or default_output(args.runs))
    if args.json:
        facts = [{"name": r.name, "status": r.status, "whole": r.whole, "problems": len(r.problems)} for r in found]
        print_json({"page": str(page), "bytes": page.stat().st_size, "runs": facts})
    else:
        _print(found)
        print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    if args.open:
        webbrowser.open(page.resolve().as_uri())
    return 0


def _print(runs: "list[Run]") -> None:
    for found in runs:
        print(f"{found.name}: {found.status}")
        for item in found.problems[:5]:
            print(item.lines())
        if len(found.problems) > 5:
            print(f"- and {len(found.problems) - 5} more; the page has them all")
