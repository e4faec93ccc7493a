"""Make the pages of docs/methods from each method's docstring and record: python docs/generate.py [--check].

The pages are committed, so that they can be read without building anything. `--check` writes nothing and fails if one
of them is out of date. Parity figures and measured rows are taken from the tables in docs/methods.md and
docs/results/all_methods.md, which stay the one place where they are recorded.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the tools lie beside this file, not in the package
from tools.method_page import index_table, method_page
from tools.records import between, parity, results

from dpl.methods import get_method, list_methods

DOCS = Path(__file__).parent
BEGIN, END = "<!-- made by docs/generate.py -->", "<!-- end of what docs/generate.py made -->"


def pages(docs: Path) -> dict[Path, str]:
    """Return every generated page with its text, without writing anything."""
    overview = docs / "methods.md"
    text = overview.read_text()
    traces = parity(text)
    measured = results((docs / "results" / "all_methods.md").read_text())
    kinds = [get_method(name) for name in list_methods()]
    made = {docs / "methods" / f"{kind.info.name}.md": method_page(kind, traces, measured) for kind in kinds}
    before, after = between(text, BEGIN, END)
    return made | {overview: f"{before}{BEGIN}\n\n{index_table(kinds)}\n{END}{after}"}


def out_of_date(docs: Path) -> list[str]:
    """Name every page that is missing, differs from what would be made, or belongs to no method any more."""
    made = pages(docs)
    changed = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    orphans = sorted(set((docs / "methods").glob("*.md")) - set(made))
    return [str(path.relative_to(docs)) for path in changed + orphans]


def write(docs: Path) -> int:
    """Write what has changed, remove pages of methods that are gone, and return how many files were touched."""
    stale = out_of_date(docs)
    made = pages(docs)
    (docs / "methods").mkdir(exist_ok=True)
    for name in stale:
        path = docs / name
        if path in made:
            path.write_text(made[path])
        else:
            path.unlink()
    return len(stale)


def main() -> int:
    """Run the command; return the exit code (1: pages are out of date)."""
    parser = argparse.ArgumentParser(description="Make the method pages from docstrings and records.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    if not parser.parse_args().check:
        print(f"{write(DOCS)} pages written")
        return 0
    stale = out_of_date(DOCS)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
