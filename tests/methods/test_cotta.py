"""CoTTA's own logic: whose confidence decides, what is averaged, what is restored and when."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dpl
from dpl.core.errors import InputError
from dpl.methods.parts.norm_rules import BatchStatistics
from dpl.network import Network
from parity.tiny import stream, tiny_network

BATCHES = [images[:8] for images in stream(torch.float32)]


class Counted:
    """A view that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images + torch.rand(())


def cotta(**settings: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(torch.float32), "cotta", **{"views": 3, **settings})


def source_logits(images: Tensor) -> Tensor:
    network = Network(tiny_network(torch.float32))
    network.norm.rule = BatchStatistics()
    with torch.no_grad():
        return network(images).logits


def test_source_confidence_is_that_of_the_source_weights_after_updates() -> None:
    model = cotta(lr=0.05, momentum=0.5)
    for images in BATCHES[:4]:
        model(images)
        expected = source_logits(images).softmax(1).amax(1).mean()
        assert model.last.source_confidence == pytest.approx(float(expected), abs=1e-6)
    assert not torch.allclose(model.method.network(BATCHES[0]).logits, source_logits(BATCHES[0]), atol=1e-2)


@pytest.mark.parametrize(("threshold", "calls"), [(0.0, 0), (1.0, 6)])
def test_views_are_made_only_where_the_source_is_unsure(threshold: float, calls: int) -> None:
    view = Counted()
    model = cotta(threshold=threshold, augment=view)
    for images in BATCHES[:2]:
        logits = model(images)
    assert view.calls == calls
    assert model.last.averaged is (calls > 0)
    assert logits.isfinite().all()


def test_the_output_is_the_teachers_from_before_the_update() -> None:
    model = cotta(threshold=0.0, lr=0.05, momentum=0.5)
    for images in BATCHES[:3]:
        expected = model.predict(images)
        assert torch.equal(model(images), expected)
    assert not torch.allclose(model.predict(images), expected, atol=1e-3)
    assert not torch.allclose(model.predict(images), model.method.network(images).logits, atol=1e-3)


def test_output_after_is_the_updated_teachers() -> None:
    model = cotta(threshold=0.0, lr=0.05, momentum=0.5, output="after")
    assert torch.equal(model(BATCHES[0]), model.predict(BATCHES[0]))


def test_the_teacher_follows_before_weights_are_restored() -> None:
    """With everything restored the student is the source, yet its update has reached the teacher."""
    model, source = cotta(restore=1.0, momentum=0.5, lr=0.05, threshold=0.0), tiny_network(torch.float32)
    model(BATCHES[0])
    model(BATCHES[1])  # teacher and student differ from here on, so that there is a gradient
    for name, parameter in source.named_parameters():
        assert torch.equal(model.model.get_parameter(name), parameter)
    assert not torch.equal(model.method.teacher.weights.get_parameter("fc.weight"), source.fc.weight)


def test_part_of_the_weights_is_restored_exactly() -> None:
    model, source = cotta(restore=0.3, lr=0.05), tiny_network(torch.float32)
    model(BATCHES[0])
    own, origin = model.model.get_parameter("layer4.0.conv2.weight"), source.get_parameter("layer4.0.conv2.weight")
    assert 0.25 < (own == origin).float().mean() < 0.35


def test_random_views_and_restoring_repeat_and_leave_the_global_generator_alone() -> None:
    networks = [tiny_network(torch.float32) for _ in range(3)]
    before = torch.get_rng_state()
    models = [dpl.adapt(networks[i], "cotta", views=3, threshold=1.0, seed=seed) for i, seed in enumerate((1, 1, 2))]
    first, same, other = (torch.stack([model(images) for images in BATCHES[:3]]) for model in models)
    assert torch.equal(first, same)
    assert not torch.allclose(first, other, atol=1e-4)
    assert torch.equal(torch.get_rng_state(), before)


def test_reset_and_snapshot_are_exact(tmp_path: Path) -> None:
    model = cotta(threshold=1.0, lr=0.01)
    start = [model(images) for images in BATCHES[:2]]
    model.save(tmp_path / "snapshot")
    back = dpl.load(tmp_path / "snapshot", tiny_network(torch.float32))
    assert torch.equal(back(BATCHES[2]), model(BATCHES[2]))
    assert torch.equal(back(BATCHES[3]), model(BATCHES[3]))
    back.reset()
    assert all(torch.equal(back(images), logits) for images, logits in zip(BATCHES, start, strict=False))


def test_source_weights_follow_the_model_and_are_kept_once() -> None:
    model = cotta(threshold=1.0).double()
    model(BATCHES[0].double())
    assert all(weight.dtype == torch.float64 for weight in model.method.source.values)
    assert {key.split(".")[1] for key in model.state_dict() if key.startswith("method.")} == {
        "batches",
        "share",
        "target_statistics",
        "teacher",
    }


def test_with_part_of_the_parameters_only_those_exist_twice() -> None:
    model = cotta(scope="affine", lr=0.01)
    model(BATCHES[0])
    assert model.method.teacher.weights.get_parameter("conv1.weight") is model.model.get_parameter("conv1.weight")
    assert set(model.method.source.names) == set(model.trainable)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("name", ["cotta", "cotta+dpl"])
def test_small_and_constant_batches_stay_finite(size: int, name: str) -> None:
    model = dpl.adapt(tiny_network(torch.float32), name, views=3, threshold=1.0, loss="symmetric")
    for images in (BATCHES[0][:size], torch.full_like(BATCHES[0][:size], 0.5), BATCHES[0][:1].repeat(size, 1, 1, 1)):
        for _ in range(3):
            assert model(images).isfinite().all()
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_images_normalised_outside_the_network_are_refused_even_if_no_view_is_needed() -> None:
    model = cotta(threshold=0.0)
    before = model.state_dict()
    with pytest.raises(InputError, match="normalise inside"):
        model(BATCHES[0] * 4 - 2)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert cotta(augment=lambda x: x)(BATCHES[0] * 4 - 2).isfinite().all()
