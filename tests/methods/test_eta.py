import math

import torch
from torch import Tensor

import dpl
from parity.tiny import stream, tiny_network


def slow_eta(logits: Tensor, average: list[float] | None, margin: float, d: float) -> tuple[float, list[float] | None]:
    """Loss and new average prediction, sample by sample."""
    chosen, losses = [], []
    for p in logits.softmax(dim=1).tolist():
        h = -sum(q * math.log(q) for q in p)
        if h >= margin:
            continue
        if average is not None:
            dot = sum(a * q for a, q in zip(average, p, strict=True))
            if abs(dot / math.hypot(*average) / math.hypot(*p)) >= d:
                continue
        chosen.append(p)
        losses.append(math.exp(margin - h) * h)
    if not chosen:
        return 0.0, average
    mean = [sum(column) / len(chosen) for column in zip(*chosen, strict=True)]
    if average is not None:
        mean = [0.9 * a + 0.1 * m for a, m in zip(average, mean, strict=True)]
    return sum(losses) / len(losses), mean


def test_loss_and_average_equal_a_slow_loop() -> None:
    adaptive = dpl.adapt(tiny_network(), "eta", margin=0.3, max_similarity=0.35)
    average = None
    for images in stream()[:5]:
        loss, average = slow_eta(adaptive(images), average, 0.3 * math.log(10), 0.35)
        assert average is not None
        assert math.isclose(adaptive.last.loss, loss, rel_tol=1e-10)
        torch.testing.assert_close(adaptive.method.average, torch.tensor(average).double(), rtol=1e-6, atol=1e-7)


def test_a_batch_without_reliable_samples_changes_nothing() -> None:
    adaptive = dpl.adapt(tiny_network(), "eta")
    adaptive(stream()[0])
    before = adaptive.state_dict()
    adaptive(torch.full((4, 3, 16, 16), 0.5, dtype=torch.float64))
    assert not adaptive.last.updated
    assert adaptive.last.reliable == 0
    after = adaptive.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if "target_statistics" not in name)


def test_the_first_reliable_batch_may_come_late() -> None:
    late, prompt = dpl.adapt(tiny_network(), "eta"), dpl.adapt(tiny_network(), "eta")
    late(torch.full((4, 3, 16, 16), 0.5, dtype=torch.float64))
    assert torch.equal(late(stream()[0]), prompt(stream()[0]))
    assert torch.equal(late.method.average, prompt.method.average)


def test_everything_is_redundant_after_the_first_batch_when_nothing_may_be_similar() -> None:
    adaptive = dpl.adapt(tiny_network(), "eta", max_similarity=0.0)
    adaptive(stream()[0])
    assert adaptive.last.updated
    adaptive(stream()[1])
    assert adaptive.last.reliable > 0
    assert adaptive.last.selected == 0
    assert not adaptive.last.updated
