"""TAST against a slow loop over members and samples, and its degenerate cases."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dpl
from dpl.core.random import Random
from dpl.memory.supports import EMPTY
from dpl.methods.parts.supports import SupportSet
from dpl.methods.parts.votes import EnsembleHead, vote
from parity.tiny import stream, tiny_network


def member(head: EnsembleHead, e: int, v: Tensor) -> Tensor:
    return (head.weight @ (v * head.scale_in[e])) * head.scale_out[e] + head.bias[e]


def slow_answer(head: EnsembleHead, supports: SupportSet, z: Tensor, k: int) -> Tensor:
    """Project every support, average per class, let the k nearest vote: one sample, one member at a time."""
    rows = [
        [f for f, h in zip(*pair, strict=True) if h < EMPTY]
        for pair in zip(supports.features, supports.entropies, strict=True)
    ]
    everything = [row for group in rows for row in group]
    answers = []
    for query in z:
        nearest = sorted(everything, key=lambda row: -torch.cosine_similarity(query, row, dim=0).item())[:k]
        probabilities = []
        for e in range(len(head.bias)):
            centroids = [
                sum(member(head, e, f) for f in g) / len(g) if g else torch.zeros_like(head.bias[e]) for g in rows
            ]
            for row in nearest:
                cosines = [torch.cosine_similarity(member(head, e, row), c, dim=0) for c in centroids]
                probabilities.append((10 * torch.stack(cosines)).softmax(0))
        answers.append(torch.stack(probabilities).mean(dim=0))
    return torch.stack(answers)


@torch.no_grad()
def test_prediction_equals_a_slow_loop() -> None:
    model = dpl.adapt(tiny_network(), "tast", ensemble_size=3, neighbours=3, filter_k=4)
    model(stream()[0]), model(stream()[1])
    images = stream()[2][:4]
    z = model.method.network(images).z
    wanted = slow_answer(model.method.head, model.method.supports, z, 3)
    assert torch.allclose(model.predict(images).exp(), wanted, rtol=0, atol=1e-10)


def test_output_is_a_log_probability() -> None:
    model = dpl.adapt(tiny_network(), "tast")
    for images in stream()[:3]:
        logits = model(images)
        assert torch.allclose(logits.exp().sum(dim=1), torch.ones(32).double())
        assert torch.allclose(logits.softmax(dim=1), logits.exp())


def test_only_the_head_trains() -> None:
    model = dpl.adapt(tiny_network(), "tast")
    source, head = tiny_network().state_dict(), model.method.head.weight.detach().clone()
    model(stream()[0])
    assert all(name.startswith("head.") for name in model.trainable)
    assert all(torch.equal(value, source[key]) for key, value in model.model.state_dict().items())
    assert not torch.equal(model.method.head.weight, head)


def test_training_lowers_the_loss_on_a_repeated_batch() -> None:
    model = dpl.adapt(tiny_network(), "tast", steps=1)
    model(stream()[0])
    first = model.last.loss
    for _ in range(30):
        model(stream()[0])
    assert model.last.loss < first


def test_head_is_drawn_from_the_seed_alone() -> None:
    network, before = tiny_network(), torch.get_rng_state()
    same, other = (dpl.adapt(network, "tast", seed=seed).method.head for seed in (0, 1))
    again = EnsembleHead(32, 5, Random(0, torch.device("cpu")), torch.float64)
    assert torch.equal(same.weight, again.weight)
    assert torch.equal(same.scale_out, again.scale_out)
    assert not torch.equal(same.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert same.scale_in.std().item() == pytest.approx((2 / 32) ** 0.5, rel=0.2)


def test_works_with_fewer_supports_than_neighbours() -> None:
    model = dpl.adapt(tiny_network(), "tast", filter_k=1, neighbours=8)
    assert model(stream()[0][:1]).isfinite().all()
    narrow = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))  # features too few for a quarter of them
    model = dpl.adapt(narrow, "tast", neighbours=8, filter_k=20)
    assert model(torch.randn(1, 3, 1, 1)).isfinite().all()


def test_vote_averages_only_what_was_found() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [9.0, 0.0]]])  # [B=1, k=3, C=2]
    found = torch.tensor([[True, True, False]])
    hard, soft = vote(logits, found)
    assert torch.equal(hard, torch.tensor([[0.5, 0.5]]))
    assert torch.allclose(soft, F.softmax(logits[0, :2], dim=1).mean(dim=0)[None])


def test_keeping_all_limits_the_voters_to_the_average_class() -> None:
    model = dpl.adapt(tiny_network(), "tast", filter_k=-1, neighbours=8)
    model(stream()[0])  # 42 supports, 10 classes
    _, found = model.method._neighbours(model.method.network(stream()[1]).z)
    assert (found.sum(dim=1) == 4).all()
