"""`dpl report`: one page that shows a run, whatever state it is in.

Here: reading runs, summing them up, and the page. Measuring, and the tables of the paper, are elsewhere.
"""

from collections.abc import Sequence
from pathlib import Path

from dpl.core.errors import DataError
from dpl.report.page import write_report
from dpl.report.predictions import find_predictions, read_predictions
from dpl.report.runs import Run, read_store
from dpl.report.tables import write_tables

__all__ = ["Run", "default_output", "read_runs", "write_report", "write_tables"]


def read_runs(path: Path, data: Path | None = None) -> list[Run]:
    """Return the runs at a path: a folder of `dpl bench`, or predictions of `dpl adapt`, one or several."""
    if not path.exists():
        raise DataError(f"{path}: there is no such folder or file; expected the --out of dpl bench or dpl adapt")
    for folder in (path, path / "runs"):  # dpl reproduce keeps its results in the latter
        if any((folder / name).is_dir() for name in ("units", "plans", "failures", "claims")):
            return [read_store(folder, data)]
    runs = [read_predictions(file, data) for file in find_predictions(path)]
    if not runs:
        raise DataError(f"{path}: holds no result; expected the --out of dpl bench or dpl adapt")
    return runs


def default_output(paths: Sequence[Path]) -> Path:
    """Return where a report is written by default: into the run's folder, of several runs into the current one."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")
