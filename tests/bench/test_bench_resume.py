"""A run may be killed at any moment: what was finished stays, the rest is run, and the figures are the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.tiny import context_of, everything_file, run_all, units_of, without_times
from dpl.bench import GridRun, Store, cell_rows, run_in_processes


@pytest.fixture(scope="module")
def undisturbed(everything, one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_all(everything_file(folder), everything, folder / "out")


def start_bench(file: Path, root: Path, out: Path) -> subprocess.Popen:
    # A parent that ignores interrupts (a shell's background job) would hand that down.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from dpl.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--data", str(root), "--out", str(out), "--threads", "1"]
    command = [sys.executable, "-c", code, "bench", str(file), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("units/[!.]*/done")}


def end_after(process: subprocess.Popen, out: Path, count: int, how: signal.Signals) -> tuple[set[str], str]:
    """Wait until so many units are done, end the process, and return which units are done then."""
    deadline = time.monotonic() + 250
    while len(finished(out)) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, how)
    _, errors = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -how), errors
    return finished(out), errors


def same_results(cells, one: Store, other: Store) -> None:
    assert without_times(cell_rows(cells, one)) == without_times(cell_rows(cells, other))
    for unit in (unit for cell in cells for unit in cell.units()):
        first, second = one.predictions(unit), other.predictions(unit)
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def test_killed_interrupted_and_resumed_gives_the_same_figures_on_all_eight_layouts(undisturbed, everything, tmp_path):
    grid, store = undisturbed
    file, out = everything_file(tmp_path), tmp_path / "out"
    first, _ = end_after(start_bench(file, everything, out), out, 3, signal.SIGKILL)
    times = {key: (out / "units" / key / "done").stat().st_mtime_ns for key in first}
    second, errors = end_after(start_bench(file, everything, out), out, len(first) + 4, signal.SIGINT)
    assert errors.splitlines()[-1] == "dpl bench: interrupted; what was finished is kept"
    assert "Traceback" not in errors
    assert first < second < {unit.key for unit in units_of(grid)}

    resumed = Store(out)
    assert GridRun(grid.cells, resumed, context_of(everything, grid)).run() == {}
    same_results(grid.cells, store, resumed)
    assert times == {key: (out / "units" / key / "done").stat().st_mtime_ns for key in first}, "a unit was run again"
    assert {path.name for path in (out / "units").iterdir()} == {unit.key for unit in units_of(grid)}, "drafts are left"


def test_two_processes_share_a_store_and_run_each_unit_once(undisturbed, everything, tmp_path):
    grid, store = undisturbed
    shared, events = Store(tmp_path / "out"), []
    cells = [cell for cell in grid.cells if cell.section in ("pacs", "cifar100_c")]
    context = context_of(everything, grid)
    assert run_in_processes(GridRun(cells, shared, context, events.append), workers=2, threads=1) == {}
    assert sorted(e.unit.key for e in events if e.ended) == sorted(u.key for cell in cells for u in cell.units())
    same_results(cells, store, Store(tmp_path / "out"))


def test_every_layout_was_measured(undisturbed):
    grid, store = undisturbed
    rows = cell_rows(grid.cells, store)
    assert {row["dataset"] for row in rows} == {section.dataset for section in grid.sections}
    assert len({section.dataset for section in grid.sections}) == 8
    for row in rows:
        assert 0 <= row["accuracy"] <= 100
        assert row["error"] == pytest.approx(100 - row["accuracy"])
        assert row["n"] == sum(row["per_class_n"]) > 0
        assert (row["updates"] > 0) <= (row["method"] != "source")


def test_a_damaged_unit_is_run_again(undisturbed, everything, tmp_path):
    grid, store = undisturbed
    unit = units_of(grid)[0]
    copy = Store(tmp_path)
    folder = tmp_path / "units" / unit.key
    folder.mkdir(parents=True)
    for name in ("unit.json", "results.jsonl", "predictions.npz", "done"):
        (folder / name).write_bytes((store.root / "units" / unit.key / name).read_bytes())
    assert copy.done(unit)
    (folder / "results.jsonl").write_text("{")
    again = Store(tmp_path)
    assert not again.done(unit)
    cell = next(cell for cell in grid.cells if cell.candidates[0].target.key == unit.key)
    assert GridRun([cell], again, context_of(everything, grid)).run() == {}
    assert without_times(again.records(unit)) == without_times(store.records(unit))
    assert json.loads((folder / "done").read_text()).keys() == {"unit.json", "results.jsonl", "predictions.npz"}
