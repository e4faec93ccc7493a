"""Tables for papers: the accuracies of runs, mean and deviation over seeds, as LaTeX, CSV and a picture."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd

from dpl.bench.tables import frame
from dpl.core.errors import DataError
from dpl.core.files import replacing, write_file
from dpl.report.predictions import joined
from dpl.report.runs import Experiment, Run
from dpl.report.summary import AccuracyTable, accuracy_table, shown
from dpl.reproduce.plotting import axes
from dpl.reproduce.render import latex

__all__ = ["FORMATS", "write_tables"]

FORMATS = {"latex": ".tex", "csv": ".csv", "png": ".png"}

Tables = Sequence[tuple[Experiment, AccuracyTable]]


def write_tables(runs: Sequence[Run], page: Path, formats: Collection[str]) -> list[Path]:
    """Write the accuracies of all experiments beside the page, one file for each format."""
    experiments = [experiment for run in joined(runs) for experiment in run.experiments if experiment.labelled]
    if formats and not experiments:
        raise DataError(f"--{' --'.join(formats)}: the run has no accuracy, because no label is known")
    tables = [(experiment, accuracy_table(experiment)) for experiment in experiments]
    return [_WRITERS[name](tables, page.with_suffix(FORMATS[name])) for name in formats]


def _write_latex(tables: Tables, path: Path) -> Path:
    """Write a tabular for each experiment (booktabs); nothing is bold, because a rank is no evidence."""
    return write_file(path, "\n".join(f"% {experiment.title}\n{_tabular(table)}" for experiment, table in tables))


def _tabular(table: AccuracyTable) -> str:
    deviations = table.deviations.map(lambda value: "" if pd.isna(value) else rf" $\pm$ {shown(value):.1f}")
    cells = table.means.map(lambda value: "--" if pd.isna(value) else f"{shown(value):.1f}") + deviations
    named = cells.rename(index=latex, columns=latex)
    return str(named.to_latex(column_format="l" + "r" * len(named.columns)))


def _write_csv(tables: Tables, path: Path) -> Path:
    """Write a line for each method and stream, figures unrounded."""
    parts = [_lines(experiment, table) for experiment, table in tables]
    return write_file(path, pd.concat(parts).to_csv(index=False))


def _lines(experiment: Experiment, table: AccuracyTable) -> pd.DataFrame:
    lines = table.means.rename_axis("method").reset_index().melt("method", var_name="stream", value_name="accuracy")
    lines.insert(0, "experiment", experiment.title)
    lines["deviation"] = table.deviations.melt()["value"]
    lines["seeds"] = lines["method"].map(frame(experiment.rows).groupby("label")["seed"].nunique())
    lines["images"] = lines["stream"].map(table.images).fillna(sum(table.images.values())).astype(int)
    return lines.sort_values("method", kind="stable", key=lambda names: names.map(table.means.index.get_loc))


def _write_png(tables: Tables, path: Path) -> Path:
    """Draw a panel for each experiment: a dot with its deviation for each method, small dots for single streams."""
    height = 1.0 + sum(0.6 + 0.25 * len(table.means) for _, table in tables)
    figure, grid = axes(len(tables), 1, height=height)
    for axis, (experiment, table) in zip(grid.flat, tables, strict=True):
        places = range(len(table.means))
        for stream in table.means.columns[1:]:
            axis.plot(table.means[stream], places, ".", color="#bbbbbb")
        axis.errorbar(table.scores, places, xerr=table.deviations.iloc[:, 0].fillna(0), fmt="o", color="#0072b2")
        axis.set_yticks(places, table.means.index)
        axis.invert_yaxis()
        axis.set_title(experiment.title, fontsize=9)
        axis.set_xlabel(f"accuracy (%), {table.scores.name}; bars: standard deviation over seeds")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")
    return path


_WRITERS = {"latex": _write_latex, "csv": _write_csv, "png": _write_png}
