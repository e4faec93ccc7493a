"""Jobs by submitit's local executor: the same figures as the serial engine, each unit once, also after a job died."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bench.test_bench_resume import same_results
from bench.tiny import context_of, everything_file, grid_of
from dpl.bench import GridRun, Store
from dpl.bench.cluster import ClusterOptions, run_on_slurm
from dpl.cli import main
from dpl.core.errors import SettingError

pytest.importorskip("submitit", reason="engine slurm needs the extra 'slurm'")

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


@pytest.fixture(scope="module")
def serial(everything, one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    grid = grid_of(everything_file(folder), everything)
    cells = [cell for cell in grid.cells if cell.section in ("pacs", "cifar100_c")]
    store = Store(folder / "out")
    assert GridRun(cells, store, context_of(everything, grid)).run() == {}
    return grid, cells, store


def test_a_job_that_dies_costs_nothing(serial, everything, tmp_path):
    grid, cells, store = serial
    shared, events, killed = Store(tmp_path / "out"), [], []

    def kill_first_job() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for path in (tmp_path / "out" / "claims").glob("*.lock"):
                pid = holder_of(path)
                if pid is not None and pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return
            time.sleep(0.002)

    thread = threading.Thread(target=kill_first_job)
    thread.start()
    options = ClusterOptions(jobs=1, executor="local")
    assert run_on_slurm(GridRun(cells, shared, context_of(everything, grid), events.append), options) == {}
    thread.join()
    assert killed, "no job was caught in the middle"
    assert sorted(event.unit.key for event in events) == sorted(unit.key for cell in cells for unit in cell.units())
    same_results(cells, store, Store(tmp_path / "out"))


def holder_of(lock: Path) -> int | None:
    """Return the process that holds a lock, as the system lists it."""
    try:
        inode = lock.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        pytest.skip("this system does not tell who holds a lock")
    found = [int(line.split()[4]) for line in lines if line.split()[5].endswith(f":{inode}")]
    return found[0] if found else None


def test_the_command_runs_jobs(serial, everything, tmp_path, capsys):
    _, cells, store = serial
    file, out = everything_file(tmp_path), tmp_path / "out"
    words = ["bench", str(file), "--data", str(everything), "--out", str(out), "--only", "section=pacs", "--json"]
    assert main([*words, "--engine", "slurm", "--slurm", "executor=local", "--slurm", "hours=1", "--threads", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len([cell for cell in cells if cell.section == "pacs"])
    same_results([cell for cell in cells if cell.section == "pacs"], store, Store(out))


def test_wrong_options_are_told():
    with pytest.raises(SettingError, match="executor='pbs'"):
        ClusterOptions(executor="pbs")
    with pytest.raises(SettingError, match="jobs=0"):
        ClusterOptions(jobs=0)
