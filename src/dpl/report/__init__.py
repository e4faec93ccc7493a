"""`dpl report`: one page that shows a run, whatever state it is in.

Here: reading runs, summing them up, and the page. Measuring, and the tables of the paper, are elsewhere.
"""

from collections.abc import Sequence
from pathlib import Path

from dpl.core.errors import DataError
from dpl.core.files import write_file
from dpl.data.images import EXTENSIONS
from dpl.report.page import render
from dpl.report.predictions import find_predictions, joined, read_predictions
from dpl.report.runs import Run, is_store, read_store
from dpl.report.tables import write_tables

__all__ = ["Run", "check_output", "default_output", "read_runs", "write_report", "write_tables"]


def read_runs(path: Path, data: Path | None = None) -> list[Run]:
    """Return the runs at a path: a folder of `dpl bench`, or predictions of `dpl adapt`, one or several."""
    if not path.exists():
        raise DataError(f"{path}: there is no such folder or file; expected the --out of dpl bench or dpl adapt")
    for folder in (path, path / "runs"):  # dpl reproduce keeps its results in the latter
        if folder.is_dir() and is_store(folder):
            return [read_store(folder, data)]
    runs = [read_predictions(file, data) for file in find_predictions(path)]
    if not runs and any(map(_holds_images, (path, *path.iterdir()))):
        raise DataError(f"{path}: holds images and no result; expected the --out of dpl bench or dpl adapt")
    return runs or [Run(path.resolve().name, "folder", "empty: no result of dpl bench or dpl adapt", whole=False)]


def default_output(paths: Sequence[Path]) -> Path:
    """Return where a report is written by default: into the run's folder, of several runs into the current one."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")


def check_output(out: Path) -> Path:
    """Return the file to write, `report.html` if a folder is named; refuse a folder of images."""
    file = out / "report.html" if out.is_dir() else out
    if _holds_images(file.parent):
        raise DataError(
            f"{file}: its folder holds images, where no page is written; name another place with --out FILE"
        )
    return file


def _holds_images(folder: Path) -> bool:
    """Say whether a folder holds images other than pictures of a report's tables, which stand beside its page."""
    images = [path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS] if folder.is_dir() else []
    return any(not path.with_suffix(".html").is_file() for path in images)


def write_report(runs: Sequence[Run], out: Path) -> Path:
    """Write the page of some runs to a file; an older one is replaced once the new one is complete."""
    shown = joined(runs)
    title = shown[0].name if len(shown) == 1 else f"{len(shown)} runs"
    return write_file(check_output(out), render(shown, title))
