"""AdaContrast's own logic: the queue, the bank, the vote, the head's learning rate, degenerate streams."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpl
from dpl.methods.parts.norm_rules import TrackRunning
from parity.tiny import stream, tiny_network

SAME = {"weak": lambda images: images, "strong": lambda images: images}


def adapt(method: str = "adacontrast", **settings: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(torch.float32), method, **({"queue_size": 24} | settings))


def batches(size: int = 8) -> list[Tensor]:
    return [images[:size] for images in stream(torch.float32)]


def test_queue_entries_are_masked_by_their_own_labels_unless_the_authors_code_is_asked_for() -> None:
    """With a queue of one batch and one class, the authors' early labels mask every negative."""
    images = batches()[0][:1].expand(8, -1, -1, -1)
    ours, theirs = (adapt(queue_size=8, authors=authors, **SAME) for authors in (False, True))
    ours(images)
    theirs(images)
    assert ours.last.queue_contrast > 1e-6
    assert theirs.last.queue_contrast == 0
    assert torch.equal(ours.method.state()["queue_labels"], theirs.method.state()["queue_labels"])


@pytest.mark.parametrize(("authors", "overwritten"), [(False, slice(0, 8)), (True, slice(16, 24))])
def test_a_full_bank_loses_its_oldest_unless_the_authors_code_is_asked_for(authors: bool, overwritten: slice) -> None:
    adaptive = adapt(authors=authors, **SAME)
    for images in batches()[:3]:
        adaptive(images)
    before: Tensor = adaptive.method.state()["bank_probabilities"]
    adaptive(batches()[3])
    changed = (adaptive.method.state()["bank_probabilities"] != before).any(dim=1)
    assert changed[overwritten].all()
    assert changed.sum() == 8


def test_neighbours_vote_once_enough_samples_were_seen() -> None:
    adaptive = adapt(refine_after=16, **SAME)
    method: Any = adaptive.method
    for images in batches()[:2]:
        adaptive(images)
    assert (method.seen, method.bank_filled) == (16, 16)
    method.bank_probabilities[:] = F.one_hot(torch.tensor(4), 10)  # now all neighbours say 4
    with method.network.norm.using(TrackRunning()):
        assert (method.pseudo_labels(batches()[2]) == 4).all()
    assert method.seen == 16


def test_the_momentum_encoder_moves_before_it_sees_the_key_and_fills_queue_and_bank() -> None:
    adaptive = adapt(momentum=0.75, lr=0.05, **SAME)
    adaptive(batches()[0])  # the encoder is still the source, the network has moved
    method: Any = adaptive.method
    expected = [
        0.75 * old + 0.25 * new
        for old, new in zip(tiny_network(torch.float32).parameters(), method.network.module.parameters(), strict=True)
    ]
    adaptive(batches()[1])
    for parameter, value in zip(method.teacher.weights.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value.detach())
    with torch.no_grad():
        out = method.teacher(batches()[1])  # batch statistics: the same features again
    torch.testing.assert_close(method.queue[8:16], F.normalize(out.z, dim=1))
    torch.testing.assert_close(method.bank[8:16], method.queue[8:16])
    torch.testing.assert_close(method.bank_probabilities[8:16], out.probabilities)
    assert (method.queue_next, method.bank_next, method.bank_filled) == (16, 16, 16)


def test_the_answer_comes_after_the_update_or_from_before_it() -> None:
    images = batches()[0]
    after = adapt()
    assert torch.equal(after(images), after.predict(images))
    source = tiny_network(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(adapt(output="before")(images), source(images))


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=4)
        self.neck = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.neck(self.conv(x).mean(dim=(2, 3))))
        return logits


def test_the_head_has_a_learning_rate_of_its_own_and_its_momentum_is_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Bottleneck()
    adaptive = dpl.adapt(model, "adacontrast", queue_size=16, head_lr_factor=10.0, lr=0.01)
    body, head = adaptive.method.optimizers["optimizer"].optimizer.param_groups
    assert (body["lr"], head["lr"]) == (0.01, 0.1)
    assert (len(body["params"]), len(head["params"])) == (2, 7)  # conv; neck, its BN, the classifier's three
    for images in batches()[:3]:
        adaptive(images)
    again = dpl.load(adaptive.save(tmp_path / "run"), model)
    assert all(torch.equal(adaptive(images), again(images)) for images in batches()[3:6])


def test_both_learning_rates_follow_the_effective_batch() -> None:
    adaptive = adapt(head_lr_factor=10.0, norm="auto", norm_shift=0.0, lr=0.01)
    images = batches()[0][:4]
    adaptive(images)
    body, head = adaptive.method.optimizers["optimizer"].optimizer.param_groups
    assert float(body["lr"]) == pytest.approx(0.01 * 4 / 32), "of 32 effective images there are four"
    assert float(head["lr"]) == pytest.approx(0.1 * 4 / 32)
    adaptive.reset()
    assert adaptive(images).isfinite().all()


def test_without_a_bottleneck_the_head_is_the_classifier() -> None:
    adaptive = adapt(head_lr_factor=10.0)
    head = adaptive.method.optimizers["optimizer"].optimizer.param_groups[1]
    assert [tuple(parameter.shape) for parameter in head["params"]] == [(10, 32), (10,)]


@pytest.mark.parametrize("method", ["adacontrast", "adacontrast+dpl"])
def test_any_stream_gives_finite_answers(method: str) -> None:
    adaptive = adapt(method, refine_after=8, queue_size=5)  # batches are larger than the queue
    images = batches()[0]
    for batch in (images[:1], images[:2], images[:7], torch.zeros_like(images), images[:1].expand_as(images)):
        assert adaptive(batch).isfinite().all()
    assert all(value.isfinite().all() for value in adaptive.state_dict().values())
    assert adaptive.last.updated


def test_views_are_drawn_from_the_methods_own_generator() -> None:
    model = tiny_network(torch.float32)
    before = torch.get_rng_state()
    one, other, third = (dpl.adapt(model, "adacontrast", queue_size=24, seed=seed) for seed in (0, 0, 1))
    logits = [adaptive(batches()[0]) for adaptive in (one, other, third)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert torch.equal(before, torch.get_rng_state())
