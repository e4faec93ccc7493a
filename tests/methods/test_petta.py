"""PeTTA against its algorithm written as loops, and its behaviour on degenerate streams."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dpl
from dpl.core.errors import SettingError
from dpl.memory.bank import occupied_by_age
from dpl.methods.rotta import robust_pass
from dpl.network import Network
from dpl.network.split import select_parameters
from parity.tiny import Roll, source_images, stream, tiny_network


def source(count: int = 300, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    images, labels = source_images(dtype)
    return list(zip(images[:count].split(64), labels[:count].split(64), strict=True))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target.softmax(1) * logits.log_softmax(1)).sum(1)


class Reference:
    """The update, with a loop wherever the method has none."""

    def __init__(self, loss: str) -> None:
        self.student, self.teacher, self.anchor = (Network(tiny_network(torch.float64)) for _ in range(3))
        affine = select_parameters(self.student.module, "affine", None)
        self.affine = list(affine)
        self.optimizer = torch.optim.Adam(affine.values(), lr=1e-3)
        self.loss, self.view = loss, Roll()
        with torch.no_grad():
            passes = [self.student(images) for images, _ in source()]
        features = torch.cat([out.z for out in passes])
        labels = torch.cat([out.logits.argmax(1) for out in passes])
        self.mean = torch.stack([features[labels == c].mean(dim=0) for c in range(10)])
        self.variance = torch.stack([features[labels == c].var(dim=0) for c in range(10)])
        self.means = self.mean.clone()

    def divergence(self, labels: Tensor, features: Tensor) -> Tensor:
        present = labels.unique().tolist()
        gaps = [(self.means[c] - self.mean[c]) ** 2 / (self.variance[c] + 1e-6) for c in present]
        for c in present:
            self.means[c] = 0.95 * self.means[c] + 0.05 * features[labels == c].mean(dim=0)
        return 1 - torch.exp(-torch.stack(gaps).mean())

    def update(self, samples: Tensor, g: Tensor) -> None:
        with torch.no_grad():
            taught = robust_pass(self.teacher, samples, 0.05).logits
            first = robust_pass(self.anchor, samples, 0.05).logits
        plain = robust_pass(self.student, samples, 0.05).logits
        view = robust_pass(self.student, self.view(samples), 0.05).logits
        if self.loss == "sce":
            pairs = [(plain, taught), (taught, plain), (view, taught), (taught, view)]
            total = 0.25 * sum(cross_entropy(a, b).mean() for a, b in pairs)
        else:
            total = cross_entropy(view, taught).mean()
        total = total + cross_entropy(view, first).mean()
        now, before = (dict(network.module.named_parameters()) for network in (self.student, self.anchor))
        cosines = [F.cosine_similarity(now[name][None], before[name][None]).mean() for name in self.affine]
        total = total - 10 * g * sum(cosines) / len(cosines)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        rate = (1 - g) * 0.1
        with torch.no_grad():
            for slow, fast in zip(self.teacher.module.parameters(), self.student.module.parameters(), strict=True):
                slow.copy_((1 - rate) * slow + rate * fast)


@pytest.mark.parametrize("loss", ["sce", "ce"])
def test_equals_the_algorithm_written_as_loops(loss: str) -> None:
    adaptive = dpl.adapt(tiny_network(), "petta", source=source(), augment=Roll(), capacity=24, loss=loss, momentum=0.9)
    method: Any = adaptive.method
    reference = Reference(loss)
    divergences = []
    for images in stream()[:4]:
        with torch.no_grad():
            out = reference.teacher(images)
        torch.testing.assert_close(adaptive(images), out.logits, atol=1e-7, rtol=0)
        g = reference.divergence(out.logits.argmax(1), out.z)
        divergences.append(g.item())
        assert adaptive.last.divergence == pytest.approx(g.item(), abs=1e-7)
        reference.update(method.samples[occupied_by_age(method.slots)], g)
    assert divergences[0] == 0  # the moving means start at the source's
    assert divergences[-1] > 1e-3
    for ours, expected in ((adaptive.model, reference.student), (method.teacher.weights, reference.teacher)):
        for name, value in expected.module.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, atol=1e-7, rtol=0)


def test_the_anchor_keeps_the_source_weights_and_follows_the_streams_statistics() -> None:
    adaptive = dpl.adapt(tiny_network(), "petta", source=source(), lr=0.01)
    method: Any = adaptive.method
    for images in stream()[:2]:
        adaptive(images)
    original, anchor = tiny_network().state_dict(), method.anchor.weights.state_dict()
    for name, value in original.items():
        assert torch.equal(anchor[name], value) == ("running" not in name)
    assert any(not torch.equal(adaptive.model.state_dict()[name], original[name]) for name in adaptive.trainable)


def test_at_full_divergence_the_teacher_keeps_its_weights() -> None:
    adaptive = dpl.adapt(tiny_network(), "petta", source=source(), momentum=0.5)
    method: Any = adaptive.method
    method.means += 1e4
    before = copy.deepcopy(method.teacher.weights)
    adaptive(stream()[0])
    assert adaptive.last.divergence == 1
    for parameter, old in zip(method.teacher.weights.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, old)


def test_any_stream_and_a_poor_source_give_finite_answers() -> None:
    model = tiny_network(torch.float32)
    torch.nn.init.zeros_(model.bn1.bias)  # a tensor without direction
    adaptive = dpl.adapt(model, "petta", source=source(3, torch.float32))  # most classes have no image
    images = stream(torch.float32)[0][:8]
    for batch in (images[:1], images[:2], images[:7], torch.zeros_like(images), images[:1].expand_as(images)):
        assert adaptive(batch).isfinite().all()
    assert all(value.isfinite().all() for value in adaptive.state_dict().values())
    assert adaptive.last.updated
    with pytest.raises(SettingError, match="source is empty"):
        dpl.adapt(model, "petta", source=[])


def test_updates_wait_for_enough_images_if_asked_to() -> None:
    adaptive = dpl.adapt(tiny_network(), "petta", source=source(), update_every=64)
    adaptive(stream()[0])
    assert not adaptive.last.updated
    adaptive(stream()[1])
    assert adaptive.last.updated
