"""Benchmarks: experiments as records, run, stored, resumed, selected and tabulated.

Here lives what a grid of runs needs; the paper's tables are in `reproduce`, pages in `report`, options in `cli`.
"""

from dpl.bench.context import BenchContext
from dpl.bench.engine import GridRun, UnitProgress, run_in_processes
from dpl.bench.grid import ExperimentGrid, read_grid
from dpl.bench.run import Outcome, run_unit
from dpl.bench.store import Store
from dpl.bench.tables import cell_rows, frame, measured_tables
from dpl.bench.unit import Candidate, Cell, SourceData, Unit

__all__ = [
    "BenchContext", "Candidate", "Cell", "ExperimentGrid", "GridRun", "Outcome", "SourceData", "Store", "Unit",
    "UnitProgress", "cell_rows", "frame", "measured_tables", "read_grid", "run_in_processes", "run_unit",
]  # fmt: skip
