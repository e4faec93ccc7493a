"""SHOT: information maximisation plus pseudo-labels."""

import pytest
import torch

import dpl
from parity.tiny import stream, tiny_network


def test_label_term_is_the_cross_entropy_of_the_confident() -> None:
    adaptive = dpl.adapt(tiny_network(), "shot", confidence=0.8, label_weight=0.3)
    p = adaptive(stream()[0]).softmax(dim=1)
    confident = [row.max().item() for row in p if row.max() > 0.8]
    expected = -sum(torch.tensor(v).double().log().item() for v in confident) / len(confident)
    assert adaptive.last.confident == pytest.approx(len(confident) / len(p))
    assert adaptive.last.loss - adaptive.last.information == pytest.approx(0.3 * expected, abs=1e-6)


def test_without_a_confident_sample_it_is_shot_im() -> None:
    shot, plain = dpl.adapt(tiny_network(), "shot", confidence=1.0), dpl.adapt(tiny_network(), "shot_im")
    for images in stream()[:3]:
        assert torch.equal(shot(images), plain(images))
    assert all(torch.equal(a, b) for a, b in zip(shot.model.parameters(), plain.model.parameters(), strict=True))


@pytest.mark.parametrize("confident", [True, False])
def test_a_batch_of_one_takes_a_step_only_if_it_is_confident(confident: bool) -> None:
    adaptive = dpl.adapt(tiny_network(), "shot", confidence=0.0 if confident else 1.0)
    adaptive(stream()[0][:1])
    assert adaptive.last.updated == confident
