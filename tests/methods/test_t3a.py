"""T3A against a slow loop, and its treatment of "keep all"."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dpl
from dpl.core.errors import SettingError
from dpl.memory.supports import EMPTY
from parity.tiny import stream, tiny_network


def slow_t3a(batches: list[Tensor], k: int | None) -> list[Tensor]:
    """The paper's algorithm with lists of supports and a loop over classes."""
    network = tiny_network()
    features: list[Tensor] = []
    network.fc.register_forward_pre_hook(lambda _layer, args: features.append(args[0]))
    supports: list[list[tuple[float, Tensor]]] = [[] for _ in range(10)]

    def put(z: Tensor, logits: Tensor) -> None:
        p = logits.softmax(0)
        supports[int(logits.argmax())].append((-(p * p.log()).sum().item(), z))

    answers = []
    with torch.no_grad():
        for row in network.fc.weight:
            put(row, network.fc(row))
        for images in batches:
            logits = network(images)
            z = features[-1]
            for i in range(len(images)):
                put(z[i], logits[i])
            supports = [sorted(rows, key=lambda pair: pair[0])[:k] for rows in supports]
            templates = [sum((s / s.norm() for _, s in rows), torch.zeros(32).double()) for rows in supports]
            answers.append(z @ F.normalize(torch.stack(templates), dim=1).T)
    return answers


@pytest.mark.parametrize("k", [1, 7, None])
def test_equals_the_slow_loop(k: int | None) -> None:
    model = dpl.adapt(tiny_network(), "t3a", filter_k=k or -1)
    for images, wanted in zip(stream()[:6], slow_t3a(stream()[:6], k), strict=True):
        assert torch.allclose(model(images), wanted, rtol=0, atol=1e-11)


def test_keeping_all_is_bounded_by_the_capacity() -> None:
    model = dpl.adapt(tiny_network(), "t3a", filter_k=-1, capacity=60)
    same = dpl.adapt(tiny_network(), "t3a", filter_k=6)
    for images in stream():
        assert torch.equal(model(images), same(images))
    assert model.last.supports <= 60
    assert model.method.supports.features.shape == (10, 6, 32)


def test_state_stays_bounded() -> None:
    model = dpl.adapt(tiny_network(torch.float32), "t3a", filter_k=5)
    for _ in range(3):
        for images in stream(torch.float32):
            model(images)
    assert model.last.supports <= 50
    assert model.method.supports.features.shape == (10, 5, 32)


def test_by_default_no_class_loses_its_only_support() -> None:
    images = stream()[0]
    ours, theirs = (dpl.adapt(tiny_network(), "t3a", filter_k=-1, authors=authors) for authors in (False, True))
    ours(images), theirs(images)
    assert ours.last.supports == 42
    assert theirs.last.supports == 32
    lost = (theirs.method.supports.entropies == EMPTY).all(dim=1)
    assert lost.any()
    assert (theirs.predict(images)[:, lost] == 0).all()
    assert (ours.predict(images) != 0).all()


def test_prediction_uses_the_supports_and_adds_none() -> None:
    model = dpl.adapt(tiny_network(), "t3a")
    first, second = stream()[:2]
    z = model.method.network(first).z
    assert torch.allclose(model.predict(first), z @ F.normalize(tiny_network().fc.weight, dim=1).T)
    model(first)
    before = model.state_dict()
    answer = model.predict(second)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not torch.equal(answer, model(second))


def test_cached_sums_follow_the_supports_when_few_classes_are_touched() -> None:
    model = dpl.adapt(tiny_network(), "t3a", filter_k=3)
    for images in stream():
        model(images[:4])  # fewer samples than classes: only those classes are summed again
        supports = model.method.supports
        held = (supports.entropies < EMPTY)[:, :, None]
        wanted = (F.normalize(supports.features, dim=2) * held).sum(dim=1)
        assert torch.allclose(supports.sums, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [0, -2, 2.5])
def test_filter_k_is_checked(value: float) -> None:
    with pytest.raises(SettingError, match="filter_k"):
        dpl.adapt(tiny_network(), "t3a", filter_k=value)
