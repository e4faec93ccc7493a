"""Files brought to another machine: the same bytes, fetched once however many ask, and only the data sets needed."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.tiny import unit_of
from dpl.bench import Context
from dpl.bench.engines import placing
from dpl.bench.engines.placing import absolute, data_parcel, file_parcel, place
from dpl.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(placing, "_PART", 1000)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_data_set_travels_alone_and_whole(everything, small_parts, tmp_path):
    unit, context = unit_of(everything, "pacs", domains=("photo",))
    parcel = data_parcel([unit], context)
    assert {name.split("/")[0] for name, _, _ in parcel.files} == {"PACS"}
    copy = place(parcel, tmp_path, parcel.read)
    assert content(copy / "PACS") == content(everything / "PACS")
    assert max(sum(len(data) for _, data in parcel.read(i)) for i in range(len(parcel.parts))) <= 1000
    assert parcel.lies_at(copy)
    assert not parcel.lies_at(tmp_path)


def test_corrupted_sets_are_found_by_their_files(everything):
    unit, context = unit_of(everything, "cifar100_c", domains=("fog",), severities=(3,))
    parcel = data_parcel([unit], context)
    assert {name.split("/")[0] for name, _, _ in parcel.files} == {"CIFAR-100-C"}


def test_of_many_that_ask_one_fetches(small_parts, tmp_path):
    (tmp_path / "weights").write_bytes(np.random.default_rng(0).bytes(4500))
    (tmp_path / "empty").write_bytes(b"")
    parcel, fetched, found = file_parcel(tmp_path / "weights"), [], []

    def fetch(number):
        fetched.append(number)
        return parcel.read(number)

    asking = [threading.Thread(target=lambda: found.append(place(parcel, tmp_path / "node", fetch))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert fetched == [0, 1, 2, 3, 4]
    assert len(set(found)) == 1
    assert (found[0] / "weights").read_bytes() == (tmp_path / "weights").read_bytes()
    empty = place(file_parcel(tmp_path / "empty"), tmp_path / "node", file_parcel(tmp_path / "empty").read)
    assert (empty / "empty").read_bytes() == b""


def test_a_copy_that_was_cut_off_begins_anew(small_parts, tmp_path):
    (tmp_path / "weights").write_bytes(b"0123456789" * 250)
    parcel = file_parcel(tmp_path / "weights")

    def cut_off(number):
        if number == 1:
            raise KeyboardInterrupt
        return parcel.read(number)

    with pytest.raises(KeyboardInterrupt):
        place(parcel, tmp_path / "node", cut_off)
    copy = place(parcel, tmp_path / "node", parcel.read)
    assert (copy / "weights").read_bytes() == (tmp_path / "weights").read_bytes()


def test_changed_files_are_another_parcel_and_a_shorter_one_is_an_error(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    before = file_parcel(path)
    os.truncate(path, 3)
    assert file_parcel(path).key != before.key
    assert not before.lies_at(tmp_path)
    with pytest.raises(DataError, match="became shorter"):
        before.read(0)


def test_paths_hold_in_other_folders_and_links_are_followed(everything, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").symlink_to(everything / "PACS")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PACS").symlink_to(tmp_path / "elsewhere")
    unit, context = unit_of(everything, "pacs", domains=("photo",))
    monkeypatch.chdir(tmp_path)
    linked = absolute(Context(Path("data"), context.files, cache=Path("cache")))
    assert (linked.data, linked.cache, linked.decoded) == (tmp_path / "data", tmp_path / "cache", None)
    names = [name for name, _, _ in data_parcel([unit], linked).files]
    assert names == [name for name, _, _ in data_parcel([unit], context).files]
