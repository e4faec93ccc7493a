from pathlib import Path

import pytest
import torch

import dpl
from parity.tiny import stream, tiny_network


@pytest.mark.parametrize("added", ["", "+dpl"])
def test_is_eta_that_is_reset_every_fourth_batch(added: str) -> None:
    rdumb, eta = dpl.adapt(tiny_network(), f"rdumb{added}", reset_every=4), dpl.adapt(tiny_network(), f"eta{added}")
    moved = False
    for count, images in enumerate(stream()[:10], start=1):
        assert torch.equal(rdumb(images), eta(images))
        assert rdumb.last.restarted == (count % 4 == 0)
        moved = moved or eta.last.updated
        if count % 4 == 0:
            eta.reset()
        assert torch.equal(rdumb.predict(images), eta.predict(images))
    assert moved


def test_the_count_survives_a_snapshot(tmp_path: Path) -> None:
    adaptive = dpl.adapt(tiny_network(), "rdumb", reset_every=3)
    for images in stream()[:2]:
        adaptive(images)
    adaptive.save(tmp_path / "snapshot")
    loaded = dpl.load(tmp_path / "snapshot", tiny_network())
    loaded(stream()[2])
    assert loaded.last.restarted
    source = tiny_network().state_dict()
    assert all(torch.equal(value, source[name]) for name, value in loaded.model.state_dict().items())
