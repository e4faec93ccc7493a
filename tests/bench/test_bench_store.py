"""Results appear all at once; a unit belongs to one process at a time, however that process ends."""

import multiprocessing
import os
import signal

import numpy as np
import pytest

from dpl.bench import Outcome, Store, Unit
from dpl.core.errors import DataError


def a_unit(**fields) -> Unit:
    values = {"dataset": "pacs", "domains": ("sketch",), "batch_size": 8, "seed": 0, "network": "debug_cnn",
              "weights": "0" * 64, "method": "tent"}  # fmt: skip
    return Unit(**(values | fields))


def an_outcome(accuracy: float = 50.0, segment: str = "sketch") -> Outcome:
    record = {"segment": segment, "visit": 0, "accuracy": accuracy, "n": 4}
    return Outcome([record], {"label": np.arange(4, dtype=np.uint16)})


def test_a_unit_comes_back_from_its_record():
    unit = a_unit(settings={"lr": 1e-3, "top": ("layer4",)}, severities=(5,), files={"images": "1" * 64})
    assert Unit.from_record(unit.record()).key == unit.key


def test_each_field_changes_the_key():
    others = [a_unit(seed=1), a_unit(batch_size=9), a_unit(weights="1" * 64), a_unit(settings={"lr": 0.1}),
              a_unit(limit=3), a_unit(part="inside"), a_unit(transform="square 32"), a_unit(corrupt=0)]  # fmt: skip
    assert len({a_unit().key, *(unit.key for unit in others)}) == len(others) + 1


def test_an_unknown_field_of_a_record_is_named():
    with pytest.raises(DataError, match="Did you mean 'seed'"):
        Unit.from_record(a_unit().record() | {"sed": 1})
    unused = {"changing": None, "imbalance": None, "outliers": None, "outlier_ratio": 1.0}
    again = Unit.from_record(a_unit().record() | unused)
    assert (again, again.key) == (a_unit(), a_unit().key)


def test_commit_then_read(tmp_path):
    store, unit = Store(tmp_path), a_unit()
    assert not store.done(unit)
    store.commit(unit, an_outcome(75.0))
    again = Store(tmp_path)
    assert again.done(unit)
    assert again.records(unit)[0]["accuracy"] == 75.0
    np.testing.assert_array_equal(again.predictions(unit)["label"], np.arange(4))
    assert [u.key for u in again.units()] == [unit.key]


def test_a_unit_that_is_keyed_otherwise_today_is_not_listed(tmp_path):
    store, unit = Store(tmp_path), a_unit()
    store.commit(unit, an_outcome(75.0))
    (tmp_path / "units" / unit.key).rename(tmp_path / "units" / ("0" * 24))
    assert list(store.units()) == []


def test_the_first_of_two_commits_stays(tmp_path):
    store, unit = Store(tmp_path), a_unit()
    store.commit(unit, an_outcome(75.0))
    Store(tmp_path).commit(unit, an_outcome(10.0))
    assert store.records(unit)[0]["accuracy"] == 75.0
    assert [path.name for path in (tmp_path / "units").iterdir()] == [unit.key]


def test_rows_filter_by_any_field(tmp_path):
    store = Store(tmp_path)
    for seed in (1, 2):
        store.commit(a_unit(seed=seed), an_outcome(10.0 * seed))
    assert [row["accuracy"] for row in store.rows(seed=2, method="tent")] == [20.0]
    assert len(store.rows()) == 2
    assert store.rows(method="dpl") == []


def test_a_claim_keeps_others_out_and_ends(tmp_path):
    store, unit = Store(tmp_path), a_unit()
    with store.claim(unit) as mine:
        assert mine
        with Store(tmp_path).claim(unit) as theirs:
            assert not theirs
        with store.claim(a_unit(seed=9)) as other:
            assert other
    with Store(tmp_path).claim(unit) as again:
        assert again
    assert list((tmp_path / "claims").iterdir()) == []


def hold(folder, ready):
    with Store(folder).claim(a_unit()):
        ready.set()
        signal.pause()


def test_a_killed_process_loses_its_claim_and_its_draft(tmp_path):
    spawn = multiprocessing.get_context("fork")
    ready = spawn.Event()
    process = spawn.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    (tmp_path / "units" / f".{a_unit().key}.{process.pid}.tmp").mkdir(parents=True)
    with Store(tmp_path).claim(a_unit()) as mine:
        assert not mine
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with Store(tmp_path).claim(a_unit()) as mine:
        assert mine
        assert list((tmp_path / "units").iterdir()) == []


@pytest.mark.parametrize("name", ["unit.json", "results.jsonl", "predictions.npz", "done"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_folder_that_is_not_whole_does_not_count(tmp_path, name, damage):
    unit = a_unit()
    path = Store(tmp_path).commit(unit, an_outcome()) / name
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-3])
    store = Store(tmp_path)
    assert not store.done(unit)
    assert list(store.units()) == []
    store.commit(unit, an_outcome(33.0))
    assert store.records(unit)[0]["accuracy"] == 33.0


def test_a_failure_counts_since_a_time(tmp_path):
    store, unit = Store(tmp_path), a_unit()
    store.note_failure(unit, "no reason", "details")
    assert store.failure(unit, since=0.0) == "no reason"
    assert store.failure(unit, since=1e12) is None
    store.commit(unit, an_outcome())
    assert store.failure(unit, since=0.0) is None
