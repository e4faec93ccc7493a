"""`dpl report`: one page that shows a run, whatever state it is in."""

import os
from collections.abc import Sequence
from pathlib import Path

from dpl.core.errors import DataError
from dpl.report.audit import is_store
from dpl.report.folders import find_predictions, read_predictions
from dpl.report.model import Run
from dpl.report.render import render
from dpl.report.stores import read_store

__all__ = ["Run", "default_output", "read_runs", "write_report"]


def read_runs(path: Path, data: Path | None = None) -> list[Run]:
    """Return what lies at a path: a folder of `dpl bench`, or predictions of `dpl adapt`, one or several."""
    if not path.exists():
        raise DataError(f"{path}: there is no such folder or file; expected the --out of dpl bench or dpl adapt")
    for folder in (path, path / "runs"):  # dpl reproduce keeps its results in the latter
        if folder.is_dir() and is_store(folder):
            return [read_store(folder, data)]
    runs = [read_predictions(file, data) for file in find_predictions(path)]
    return runs or [
        Run(path.resolve().name, "folder", "empty: no result of dpl bench or dpl adapt", whole=False, path=path)
    ]


def default_output(paths: Sequence[Path]) -> Path:
    """Return where a report goes if nobody says: into the run's folder, of several runs into the current one."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")


def write_report(runs: Sequence[Run], out: Path) -> Path:
    """Write the page of some runs; it is seen whole or not at all."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.tmp")
    draft.write_text(render(runs, title), encoding="utf-8")
    os.replace(draft, out)
    return out
