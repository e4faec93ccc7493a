"""Generate the reference and data pages of the documentation: python docs/generate.py [--check].

The pages are committed, so that they can be read without building anything. `--check` writes nothing and fails if one
of them is out of date. Sources: settings, docstrings and parsers of the package, the OpenAPI document of the server,
and the measured figures in docs/results/data.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the tools lie beside this file, not in the package
from tools.cli_page import cli_page
from tools.guard_page import guard_page
from tools.http_page import http_page
from tools.method_page import method_page, methods_page
from tools.records import read_all_methods, read_parity
from tools.results_pages import devices_page, estimate_page, parity_page, speed_page
from tools.settings_page import settings_page

from dpl.methods import get_method, list_methods

DOCS = Path(__file__).parent


def pages() -> dict[str, str]:
    """Return every generated page, by its path below docs, with its text."""
    data = DOCS / "results" / "data"
    runs = read_parity(data / "parity.json")
    measured = read_all_methods(DOCS / "results" / "all_methods.md")
    kinds = [get_method(name) for name in list_methods()]
    methods = {f"methods/{kind.info.name}.md": method_page(kind, runs, measured) for kind in kinds}
    return methods | {
        "devices.md": devices_page(data / "devices.json", data / "other_device.json"),
        "methods.md": methods_page(kinds),
        "reference/cli.md": cli_page(),
        "reference/guard.md": guard_page(),
        "reference/http.md": http_page(),
        "reference/settings.md": settings_page(),
        "results/estimate.md": estimate_page(data / "estimate.json"),
        "results/parity.md": parity_page(data / "parity.json"),
        "results/speed.md": speed_page(data / "speed.json", data / "late_start.json"),
    }


def out_of_date(docs: Path, made: dict[str, str]) -> list[str]:
    """Name every page that is missing, differs from what was made, or belongs to no method any more."""
    changed = [name for name, text in made.items() if not (docs / name).is_file() or (docs / name).read_text() != text]
    present = {path.relative_to(docs).as_posix() for path in (docs / "methods").glob("*.md")}
    return changed + sorted(present - made.keys())


def write(docs: Path, made: dict[str, str]) -> int:
    """Write what has changed, remove pages of methods that are gone, and return how many files were touched."""
    stale = out_of_date(docs, made)
    for name in stale:
        path = docs / name
        if name in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name])
        else:
            path.unlink()
    return len(stale)


def main() -> int:
    """Run the command; return the exit code (1: pages are out of date)."""
    parser = argparse.ArgumentParser(description="Generate the reference and data pages of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    args = parser.parse_args()
    made = pages()
    if not args.check:
        print(f"{write(DOCS, made)} pages written")
        return 0
    stale = out_of_date(DOCS, made)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
