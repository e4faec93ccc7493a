"""Benchmarks: experiments as records, run, stored, resumed, selected and tabulated."""

from dpl.bench.context import Context
from dpl.bench.engine import Event, run_cases, run_in_processes
from dpl.bench.grid import Grid, Places, read_grid
from dpl.bench.run import Outcome, run_unit
from dpl.bench.selection import Candidate, Case
from dpl.bench.store import Store
from dpl.bench.tables import MeasuredTable, case_rows, measured_tables
from dpl.bench.unit import SourceData, Unit
from dpl.runs.online import OnlineResult, evaluate

__all__ = [
    "Candidate", "Case", "Context", "Event", "Grid", "MeasuredTable", "OnlineResult", "Outcome", "Places",
    "SourceData", "Store", "Unit", "case_rows", "evaluate", "measured_tables", "read_grid", "run_cases",
    "run_in_processes", "run_unit",
]  # fmt: skip
