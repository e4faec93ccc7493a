"""Crashes while saving, damaged and malicious files."""

import pickle
import random
import warnings
from pathlib import Path

import pytest

import dpl
from abuse import corruption, killing
from abuse.streams import network
from abuse.subjects import adapted
from dpl.core.errors import DplError, SnapshotCorrupt
from dpl.snapshot import SnapshotStore


def test_a_writer_killed_at_random_never_loses_a_finished_snapshot(tmp_path: Path) -> None:
    rng = random.Random(0)
    seen = [killing.kill_at_random(tmp_path, rng) for _ in range(6)]
    assert max(seen) > 0, "no writer lived long enough to finish a snapshot: the test saw nothing"


def test_a_writer_killed_at_every_moment_of_a_save_never_loses_a_finished_snapshot(tmp_path: Path) -> None:
    moments = 0
    while killing.kill_at_moment(tmp_path / str(moments), moments + 1) is not None:
        moments += 1
    # flush of two files and their folder, rename, flush of the store, rename of an old one: before and after each
    assert moments == 12


def test_every_damage_is_refused_by_name_and_the_snapshot_before_is_taken(tmp_path: Path) -> None:
    store, model = SnapshotStore(tmp_path), adapted("tent")
    good, victim = store.save(model), store.save(model)
    damages = corruption.damages(victim, good, cuts=8, flips=24, rng=random.Random(0))
    for file, damage in damages:
        with corruption.applied(file, damage):
            with pytest.raises(SnapshotCorrupt, match=file.name):
                dpl.load(victim, network())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                assert store.newest() == good
    assert store.newest() == victim


@pytest.mark.parametrize("offer", corruption.MALICIOUS, ids=lambda offer: offer.__name__)
def test_a_malicious_file_runs_nothing(tmp_path: Path, offer: corruption.Offer) -> None:
    proof = tmp_path / "executed"
    with pytest.raises((DplError, OSError)) as error:
        offer(tmp_path, proof)
    assert not proof.exists(), "code from a file was run"
    assert any(word in str(error.value).lower() for word in ("safetensors", "json", "yaml", "weights", "npy", "npz"))


def test_the_side_effect_would_happen(tmp_path: Path) -> None:
    """The bait is live: an unsafe reader does run it."""
    proof = tmp_path / "executed"
    pickle.loads(corruption.bait(proof))
    assert proof.exists()
