"""A real Ray cluster of two nodes on this machine: the figures of the serial engine, whatever dies meanwhile."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.test_bench_resume import end_after, finished
from bench.tiny import CORRUPTIONS, context_of, run_all, without_times, write_yaml
from dpl.bench import GridRun, Store, cell_rows
from dpl.bench.cluster import ClusterOptions, run_on_ray
from dpl.cli import main
from dpl.core.errors import DplError, SettingError
from turns import my_turn

ray = pytest.importorskip("ray", reason="engine ray needs the extra 'ray'")

from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}


def grid_file(folder: Path) -> Path:
    """Write an experiment whose units last long enough to be met half-way; one of its methods is searched for."""
    common = {"network": "debug_cnn", "weights": "{weights}/{dataset}.safetensors", "batch_size": 4, "seeds": [3]}
    pacs = {"dataset": "pacs", "protocol": "leave_one_domain_out", "targets": ["photo"], "methods": ["dpl"],
            "selection": {"lr": [0.1, 1e-3]}}  # fmt: skip
    cifar = {"dataset": "cifar100_c", "protocol": "reset_each_shift", "domains": list(CORRUPTIONS),
             "severities": [3, 5], "methods": ["tent", "dpl"], "settings": {"steps": 20}}  # fmt: skip
    settings = {"lr": 1e-3, "confidence": 0.2}
    return write_yaml(folder / "grid.yaml", {**common, "settings": settings, "sections": [pacs, cifar]})


@pytest.fixture(scope="module")
def serial(everything, one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    return run_all(grid_file(folder), everything, folder / "out")


@pytest.fixture(scope="module")
def cluster():
    with my_turn("ray"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else everything else on this machine goes first
        nodes = Cluster(initialize_head=True, connect=False, head_node_args=NODE)
        nodes.add_node(**NODE)
        yield nodes
        nodes.shutdown()


def needed(store: Store) -> set[str]:
    """Return the units that a grid came to: candidates that lost are not run on the target."""
    return {unit.key for unit in store.units()}


def same_results(cells, one: Store, other: Store) -> None:
    assert without_times(cell_rows(cells, one)) == without_times(cell_rows(cells, other))
    assert needed(one) == needed(other)
    for unit in one.units():
        first, second = one.predictions(unit), other.predictions(unit)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def busy_worker(node) -> int:
    """Return a process that runs a task for a node of our cluster."""
    parent = node.all_processes["raylet"][0].process.pid
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                title = (process / "cmdline").read_bytes()
                is_ours = f"PPid:\t{parent}\n" in (process / "status").read_text()
            except OSError:
                continue
            if is_ours and title.startswith(b"ray::_run_job"):
                return int(process.name)
        time.sleep(0.01)
    raise AssertionError("no task was met half-way")


def test_killed_worker_and_removed_node_change_nothing(serial, cluster, everything, tmp_path):
    grid, store = serial
    (lost,), killed, ended = cluster.worker_nodes, [], []

    def on_progress(progress) -> None:
        ended.append(progress.unit.key)
        if not killed:
            killed.append(busy_worker(cluster.head_node))
            os.kill(killed[0], signal.SIGKILL)
            cluster.remove_node(lost, allow_graceful=False)

    shared = Store(tmp_path / "out")
    options = ClusterOptions(address=cluster.address)
    assert run_on_ray(GridRun(grid.cells, shared, context_of(everything, grid), on_progress), options) == {}
    assert not cluster.worker_nodes
    assert sorted(ended) == sorted(needed(store)), "each unit ends once"
    same_results(grid.cells, store, Store(tmp_path / "out"))
    assert not list((tmp_path / "out" / "claims").iterdir())


def start_bench(file: Path, root: Path, out: Path, address: str) -> subprocess.Popen:
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from dpl.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--data", str(root), "--out", str(out), "--engine", "ray", "--address", address]
    command = [sys.executable, "-c", code, "bench", str(file), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_and_interrupted_driver_goes_on_where_it_was(serial, cluster, everything, tmp_path):
    grid, store = serial
    if not cluster.worker_nodes:
        cluster.add_node(**NODE)
    file, out = grid_file(tmp_path), tmp_path / "out"
    first, _ = end_after(start_bench(file, everything, out, cluster.address), out, 2, signal.SIGKILL)
    times = {key: (out / "units" / key / "done").stat().st_mtime_ns for key in first}
    second, errors = end_after(start_bench(file, everything, out, cluster.address), out, len(first) + 2, signal.SIGINT)
    assert errors.splitlines()[-1] == "dpl bench: interrupted; what was finished is kept"
    assert "Traceback" not in errors
    assert first < second < needed(store)

    resumed, ended = Store(out), []
    options = ClusterOptions(address=cluster.address)
    assert run_on_ray(GridRun(grid.cells, resumed, context_of(everything, grid), ended.append), options) == {}
    assert {progress.unit.key for progress in ended} == needed(store) - second
    assert times == {key: (out / "units" / key / "done").stat().st_mtime_ns for key in first}, "a unit was run again"
    assert finished(out) == needed(store)
    same_results(grid.cells, store, resumed)


def test_a_unit_that_fails_is_noted_and_the_others_run(serial, cluster, everything, tmp_path):
    grid, _ = serial
    cells = [cell for cell in grid.cells if cell.section == "cifar100_c"][:2]
    context = context_of(everything, grid)
    context.files = {digest: cut(path, tmp_path) for digest, path in context.files.items()}
    options = ClusterOptions(address=cluster.address, retries=0)
    failed = run_on_ray(GridRun(cells, Store(tmp_path), context), options)
    assert failed.keys() == {unit.key for cell in cells for unit in cell.units()}
    assert all("safetensors" in reason for reason in failed.values())


def test_a_node_that_does_not_see_the_data_ends_the_run(serial, cluster, tmp_path):
    grid, _ = serial
    context = context_of(tmp_path / "elsewhere", grid)
    with pytest.raises(DplError, match=r"does not see .*elsewhere; put data and results on a shared file system"):
        run_on_ray(GridRun(grid.cells, Store(tmp_path), context), ClusterOptions(address=cluster.address))


def cut(path: Path, folder: Path) -> Path:
    shorter = folder / path.name
    shorter.write_bytes(path.read_bytes()[:-1])
    return shorter


def test_options_that_cannot_work_are_told():
    with pytest.raises(SettingError, match="cpus_per_unit=0"):
        ClusterOptions(cpus_per_unit=0)


def test_a_cluster_that_cannot_be_reached_is_told(everything, tmp_path, capsys):
    words = ["bench", str(grid_file(tmp_path)), "--data", str(everything), "--out", str(tmp_path / "out")]
    for address in ("127.0.0.1:1", "ray://127.0.0.1:10001"):
        assert main([*words, "--engine", "ray", "--address", address]) == 2
        error = capsys.readouterr().err
        assert "no Ray cluster can be joined there" in error
        assert "or auto" in error


def test_without_ray_the_extra_is_named_and_nothing_else_changes(everything, tmp_path):
    code = "import sys; sys.modules['ray'] = None\nfrom dpl.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["bench", str(grid_file(tmp_path)), "--data", str(everything), "--out", str(tmp_path / "out")]
    words += ["--only", "section=cifar100_c", "--only", "method=tent", "--threads", "1"]
    asked, usual = (
        subprocess.run([sys.executable, "-c", code, *words, *more], capture_output=True, text=True, check=False)
        for more in (["--engine", "ray"], [])
    )
    assert asked.returncode == 2
    assert asked.stderr.splitlines()[-1] == (
        "dpl bench: ray is needed here and is not installed: pip install '.[ray]' in a checkout of dpl"
    )
    assert usual.returncode == 0, usual.stderr
