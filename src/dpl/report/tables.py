"""Accuracies of all experiments as tables for papers: LaTeX, CSV and a picture beside the page."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from dpl.bench.tables import frame
from dpl.core.errors import DataError
from dpl.core.files import replacing, write_file
from dpl.report.predictions import joined
from dpl.report.runs import Experiment, Run
from dpl.report.summary import AccuracyTable, accuracy_table, shown
from dpl.reproduce.document import latex
from dpl.reproduce.plotting import axes

__all__ = ["write_tables"]

Tables = Sequence[tuple[Experiment, AccuracyTable]]


def write_tables(runs: Sequence[Run], page: Path, formats: Collection[str]) -> list[Path]:
    """Write the accuracies of all experiments beside the page, one file for each format."""
    experiments = [experiment for run in joined(runs) for experiment in run.experiments if experiment.labelled]
    if formats and not experiments:
        raise DataError(f"--{' --'.join(formats)}: the run has no accuracy, because no label is known")
    tables = [(experiment, accuracy_table(experiment)) for experiment in experiments]
    return [write(tables, page.with_suffix(suffix)) for write, suffix in (_WRITERS[name] for name in formats)]


def _write_latex(tables: Tables, path: Path) -> Path:
    """Write a tabular for each experiment (booktabs); nothing is bold, because a rank is no evidence."""
    parts = []
    for experiment, table in tables:
        deviations = table.deviations.map(lambda value: "" if pd.isna(value) else rf" $\pm$ {shown(value):.1f}")
        cells = table.means.map(lambda value: "--" if pd.isna(value) else f"{shown(value):.1f}") + deviations
        named = cells.rename(index=latex, columns=latex)
        parts.append(f"% {experiment.title}\n{named.to_latex(column_format='l' + 'r' * len(named.columns))}")
    return write_file(path, "\n".join(parts))


def _write_csv(tables: Tables, path: Path) -> Path:
    """Write a line for each method, stream and seed, figures unrounded."""
    columns = ["experiment", "label", "stream", "seed", "n", "accuracy"]
    lines = pd.concat([frame(experiment.rows).assign(experiment=experiment.title) for experiment, _ in tables])
    return write_file(path, lines[columns].rename(columns={"label": "method", "n": "images"}).to_csv(index=False))


def _write_png(tables: Tables, path: Path) -> Path:
    """Draw a panel for each experiment: a dot with its deviation for each method, small dots for single streams."""
    figure, grid = axes(len(tables), 1, height=1.0 + sum(0.6 + 0.25 * len(table.means) for _, table in tables))
    for axis, (experiment, table) in zip(grid.flat, tables, strict=True):
        places = range(len(table.means))
        axis.plot(table.means.iloc[:, 1:], places, ".", color="#bbbbbb")
        axis.errorbar(table.scores, places, xerr=table.deviations.iloc[:, 0].fillna(0), fmt="o", color="#0072b2")
        axis.set_yticks(places, table.means.index)
        axis.invert_yaxis()
        axis.set(title=experiment.title, xlabel=f"accuracy (%), {table.scores.name}; bars: deviation over seeds")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")
    return path


_WRITERS = {"latex": (_write_latex, ".tex"), "csv": (_write_csv, ".csv"), "png": (_write_png, ".png")}
