"""RMT's own logic: prototypes, warm-up, the source stream's place in the state, degenerate streams."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpl
from dpl.core.errors import InputError, SettingError
from dpl.methods.parts.projector import nearest_prototype
from dpl.methods.parts.source_data import SourceStream
from dpl.network import Network
from dpl.objectives.consistency import symmetric_cross_entropy
from parity.tiny import Roll, source_images, stream, tiny_network

QUICK = {"warmup_samples": 0}


def source(count: int = 5, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    images, labels = source_images(dtype)
    return [(images[i : i + 16], labels[i : i + 16]) for i in range(0, 16 * count, 16)]


def batches() -> list[Tensor]:
    return [images[:12] for images in stream(torch.float32)]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_nearest_prototype_is_by_cosine_and_never_a_class_without_images() -> None:
    generator = torch.Generator().manual_seed(0)
    features, prototypes = torch.randn(30, 6, generator=generator), torch.randn(5, 6, generator=generator)
    cosines = nn.functional.cosine_similarity(features[:, None], prototypes[None], dim=2)
    assert torch.equal(nearest_prototype(features, prototypes), cosines.argmax(dim=1))
    prototypes[2] = 0
    cosines[:, 2] = -2
    assert torch.equal(nearest_prototype(features, prototypes), cosines.argmax(dim=1))


def test_prototypes_are_class_means_of_batch_normalised_features() -> None:
    network = Network(tiny_network(torch.float64))
    adaptive = dpl.adapt(tiny_network(torch.float64), "rmt", source=source(dtype=torch.float64), **QUICK)
    method: Any = adaptive.method
    network.norm.rule = method.network.norm.rule
    with torch.no_grad():
        features = torch.cat([network(images).z for images, _ in source(dtype=torch.float64)])
    labels = torch.cat([labels for _, labels in source()])
    for c in range(10):
        torch.testing.assert_close(method.prototypes[c], features[labels == c].mean(dim=0))


def test_warm_up_lets_student_and_teacher_agree_while_the_rate_grows() -> None:
    settings = {"warmup_samples": 3 * 16 + 5, "momentum": 0.9, "lr": 0.01}
    adaptive = dpl.adapt(tiny_network(torch.float64), "rmt", source=source(dtype=torch.float64), **settings)
    student = tiny_network(torch.float64).train()
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.0)
    for i, (images, _) in enumerate(source(dtype=torch.float64)[:3]):
        optimizer.param_groups[0]["lr"] = 0.01 * (i + 1) / 3
        optimizer.zero_grad()
        symmetric_cross_entropy(student(images), teacher(images).detach()).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
    method: Any = adaptive.method
    for ours, expected in ((adaptive.model, student), (method.teacher.weights, teacher)):
        for parameter, value in zip(ours.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, value, atol=1e-9, rtol=0)
    assert [group["lr"] for group in method.optimizer.optimizer.param_groups] == [0.01]
    assert method.source.position == 3


def test_the_warmed_model_is_what_reset_returns_to() -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "rmt", source=source(3), warmup_samples=64)
    origin = adaptive.state_dict()
    assert any(key.startswith("optimizer.") for key in origin)
    for _ in range(2):  # also the second time
        first = [adaptive(images) for images in batches()[:3]]
        assert not equal(adaptive.state_dict(), origin)
        adaptive.reset()
        assert equal(adaptive.state_dict(), origin)
    assert all(torch.equal(a, adaptive(b)) for a, b in zip(first, batches(), strict=False))


def test_a_saved_run_continues_to_the_bit_at_its_place_in_the_source(tmp_path: Path) -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "rmt", source=source(5), warmup_samples=32)
    for images in batches()[:4]:
        adaptive(images)
    assert adaptive.method.state()["source.position"] == 1  # two for the warm-up, four steps, five batches a round
    adaptive.save(tmp_path / "run")
    again = dpl.load(tmp_path / "run", tiny_network(torch.float32), source=source(5))
    method: Any = again.method
    method.attach(source(5))
    assert all(torch.equal(adaptive(images), again(images)) for images in batches()[4:9])
    again.reset()
    adaptive.reset()
    assert equal(adaptive.state_dict(), again.state_dict())


def test_a_saved_run_without_its_source_says_what_to_pass(tmp_path: Path) -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "rmt", source=source(2), **QUICK)
    again = dpl.load(adaptive.save(tmp_path / "run"), tiny_network(torch.float32))
    with pytest.raises(SettingError, match=r"dpl\.load\(folder, model, source="):
        again(batches()[0])


def test_without_source_weight_no_source_is_read_after_the_start(tmp_path: Path) -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "rmt", source=source(2), source_weight=0.0, **QUICK)
    again = dpl.load(adaptive.save(tmp_path / "run"), tiny_network(torch.float32))
    assert torch.equal(adaptive(batches()[0]), again(batches()[0]))
    assert "source" not in adaptive.last


class Counted:
    """A source that tells how often a batch was read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.count):
            self.read += 1
            yield torch.full((2, 3), float(i)), torch.zeros(2)


def test_the_source_stream_goes_round_and_finds_its_place_again() -> None:
    network, given = Network(nn.Linear(3, 2)), Counted(3)
    ours = SourceStream()
    ours.attach(given)
    seen = [int(ours.next(network)[0][0, 0]) for _ in range(7)]
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert given.read == 7  # one reader, no batch read twice
    state = ours.state()
    assert int(ours.next(network)[0][0, 0]) == 1
    ours.restore(state)
    assert [int(ours.next(network)[0][0, 0]) for _ in range(3)] == [1, 2, 0]
    other = copy.deepcopy(ours)
    assert int(other.next(network)[0][0, 0]) == int(ours.next(network)[0][0, 0]) == 1


def test_wrong_sources_are_named() -> None:
    model = tiny_network(torch.float32)
    with pytest.raises(SettingError, match="needs labelled source data"):
        dpl.adapt(model, "rmt")
    with pytest.raises(SettingError, match="read only once"):
        dpl.adapt(model, "rmt", source=iter(source(2)))
    with pytest.raises(SettingError, match="source is empty"):
        dpl.adapt(model, "rmt", source=[])
    with pytest.raises(InputError, match="from 0 to 9"):
        dpl.adapt(model, "rmt", source=[(images, labels + 5) for images, labels in source(2)])


@pytest.mark.parametrize("method", ["rmt", "rmt+dpl"])
def test_any_stream_gives_finite_answers(method: str) -> None:
    given = [(images, labels.clamp(max=3)) for images, labels in source(2)]  # six classes have no image
    adaptive = dpl.adapt(tiny_network(torch.float32), method, source=given, **QUICK)
    images = batches()[0]
    for batch in (images[:1], images[:2], images[:7], torch.zeros_like(images), images[:1].expand_as(images)):
        assert adaptive(batch).isfinite().all()
    assert all(value.isfinite().all() for value in adaptive.state_dict().values())
    assert adaptive.last.updated


def test_prediction_is_the_sum_of_student_and_teacher() -> None:
    adaptive = dpl.adapt(
        tiny_network(torch.float32), "rmt", source=source(2), augment=Roll(), momentum=0.5, output="after", **QUICK
    )
    logits = adaptive(batches()[0])
    method: Any = adaptive.method
    with torch.no_grad():
        both = [network(batches()[0]).logits for network in (method.network, method.teacher.network)]
    assert not torch.equal(both[0], both[1])
    assert torch.equal(logits, both[0] + both[1])
    assert torch.equal(adaptive.predict(batches()[0]), logits)


def test_without_a_projector_features_are_compared_as_they_are() -> None:
    adaptive = dpl.adapt(tiny_network(torch.float32), "rmt", source=source(2), projection=0, **QUICK)
    assert not any("projector" in name for name in adaptive.trainable)
    assert adaptive(batches()[0]).isfinite().all()
