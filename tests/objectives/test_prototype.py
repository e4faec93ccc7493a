"""The prototype losses against slow twins that read like the equations, and the cases the equations leave open."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.memory import update_class_memory
from dpl.objectives import (
    adain,
    classes_present,
    dpl_o,
    dpl_soft,
    dpl_star,
    prototype_regularization,
)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.norm() * b.norm())


def slow_dpl_o(z: Tensor, w: Tensor, labels: list[int], tau: float) -> Tensor:
    """Eq. 3, term by term."""
    confident = [i for i, y in enumerate(labels) if y >= 0]
    total = torch.zeros((), dtype=z.dtype)
    for i in confident:
        own = torch.exp(cosine(w[labels[i]], z[i]) / tau)
        others = [torch.exp(cosine(w[labels[i]], z[j]) / tau) for j in confident if labels[j] != labels[i]]
        total = total - torch.log(own / (own + sum(others)))
    return total / max(len(confident), 1)


def slow_dpl_star(z: Tensor, w: Tensor, labels: list[int], tau: float) -> Tensor:
    """Eq. 4, class by class."""
    present = sorted({y for y in labels if y >= 0})
    total = torch.zeros((), dtype=z.dtype)
    for k in present:
        positive = sum(torch.exp(cosine(w[k], z[i]) / tau) for i, y in enumerate(labels) if y == k)
        negative = sum(torch.exp(cosine(w[k], z[j]) / tau) for j, y in enumerate(labels) if y >= 0 and y != k)
        total = total - torch.log(positive / (positive + negative))
    return total / max(len(present), 1)


def slow_dpl_soft(z: Tensor, w: Tensor, shares: Tensor, tau: float) -> Tensor:
    """Eq. 4 without labels, class by class and sample by sample."""
    total, weights = torch.zeros((), dtype=z.dtype), torch.zeros((), dtype=z.dtype)
    for k in range(len(w)):
        everything = sum(torch.exp(cosine(w[k], z[i]) / tau) for i in range(len(z)))
        own = sum(shares[i, k] * torch.exp(cosine(w[k], z[i]) / tau) for i in range(len(z)))
        weight = min(torch.ones(()), sum(shares[i, k] for i in range(len(z))))
        total = total - weight * torch.log(own / everything)
        weights = weights + weight
    return total / weights


def slow_regularization(w: Tensor, memory: Tensor, tau: float) -> Tensor:
    """Eq. 6, class by class."""
    total = torch.zeros((), dtype=w.dtype)
    for k in range(len(w)):
        own = torch.exp(cosine(w[k], memory[k]) / tau)
        others = sum(torch.exp(cosine(w[k], memory[c]) / tau) for c in range(len(w)) if c != k)
        total = total - torch.log(own / (own + others))
    return total / len(w)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int], float]:
    size, classes, dim = draw(st.integers(1, 12)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    labels = draw(st.lists(st.integers(-1, classes - 1), min_size=size, max_size=size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    z = torch.randn(size, dim, dtype=torch.float64, generator=generator)
    w = torch.randn(classes, dim, dtype=torch.float64, generator=generator)
    return z, w, labels, draw(st.sampled_from([0.05, 0.1, 0.5, 1.0]))


@pytest.mark.parametrize(("fast", "slow"), [(dpl_o, slow_dpl_o), (dpl_star, slow_dpl_star)])
@given(batch=batches())
@settings(max_examples=80, deadline=None)
def test_equals_its_equation(fast, slow, batch) -> None:
    z, w, labels, tau = batch
    assert abs(fast(z, w, torch.tensor(labels), tau) - slow(z, w, labels, tau)) < 1e-10


@given(batch=batches(), scale=st.sampled_from([0.1, 1.0, 8.0]))
@settings(max_examples=60, deadline=None)
def test_soft_dpl_equals_its_equation(batch, scale: float) -> None:
    z, w, _, tau = batch
    shares = (scale * z @ w.T).softmax(dim=1)
    assert abs(dpl_soft(z, w, shares, tau) - slow_dpl_soft(z, w, shares, tau)) < 1e-10


@given(batch=batches())
@settings(max_examples=60, deadline=None)
def test_soft_dpl_with_one_hot_responsibilities_is_dpl_star_over_the_same_samples(batch) -> None:
    z, w, labels, tau = batch
    confident = torch.tensor(labels)[torch.tensor(labels) >= 0]
    if len(confident) == 0:
        return
    z = z[torch.tensor(labels) >= 0].requires_grad_()
    one_hot = torch.nn.functional.one_hot(confident, len(w)).to(z.dtype)
    soft, star = dpl_soft(z, w, one_hot, tau), dpl_star(z, w, confident, tau)
    assert abs(soft - star) < 1e-10
    (of_soft,), (of_star,) = torch.autograd.grad(soft, z), torch.autograd.grad(star, z)
    assert torch.allclose(of_soft, of_star, atol=1e-10)


def test_soft_dpl_of_one_sample_has_no_gradient_and_wrong_shapes_are_refused() -> None:
    z, w = torch.randn(1, 4, requires_grad=True), torch.randn(3, 4)
    dpl_soft(z, w, (z @ w.T).softmax(dim=1).detach(), 0.1).backward()
    assert z.grad is not None
    assert not z.grad.any()
    with pytest.raises(InputError, match=r"responsibilities has shape \(3, 1\)"):
        dpl_soft(z, w, torch.ones(3, 1), 0.1)


@given(batch=batches())
@settings(max_examples=60, deadline=None)
def test_regularization_equals_its_equation(batch) -> None:
    z, w, _, tau = batch
    memory = torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(len(z)))
    assert abs(prototype_regularization(w, memory, tau) - slow_regularization(w, memory, tau)) < 1e-10


@given(batch=batches(), momentum=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_memory_equals_its_equation(batch, momentum: float) -> None:
    z, w, labels, _ = batch
    expected = w.clone()
    for k in range(len(w)):
        mine = [i for i, y in enumerate(labels) if y == k]
        if mine:
            expected[k] = momentum * w[k] + (1 - momentum) / len(mine) * sum(z[i] for i in mine)
    result = update_class_memory(w, z, torch.tensor(labels), momentum)
    assert (result - expected).abs().max() < 1e-10
    absent = [k for k in range(len(w)) if k not in labels]
    assert torch.equal(result[absent], w[absent])


@pytest.mark.parametrize("loss", [dpl_o, dpl_star])
@pytest.mark.parametrize("labels", [[0, 1, 2, 1, -1], [0, 0, 0, 0, 0], [-1] * 5, [3, -1, -1, -1, 2]])
def test_gradients_are_right(loss, labels: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    w = torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b, torch.tensor(labels), 0.2), (z, w))


def test_gradients_of_the_regulariser_and_the_memory_are_right() -> None:
    z, w, history = torch.randn(3, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 0, 2, -1, 4])

    def through_memory(features: Tensor, prototypes: Tensor) -> Tensor:
        memory = update_class_memory(history, features, labels, 0.9)
        return prototype_regularization(prototypes, memory, 0.2)

    assert torch.autograd.gradcheck(through_memory, (z.clone().requires_grad_(), w.clone().requires_grad_()))


def test_equations_3_and_4_agree_with_one_sample_per_class() -> None:
    z, w = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([3, 0, 5, 1, -1, 2])
    assert abs(dpl_o(z, w, labels, 0.1) - dpl_star(z, w, labels, 0.1)) < 1e-12


@pytest.mark.parametrize("loss", [dpl_o, dpl_star])
def test_does_not_depend_on_the_scale_of_features_or_prototypes(loss) -> None:
    generator = torch.Generator().manual_seed(2)
    z, w = torch.randn(2, 6, 8, dtype=torch.float64, generator=generator)
    scale_z, scale_w = torch.rand(2, 6, 1, dtype=torch.float64, generator=generator) * 50 + 0.01
    labels = torch.tensor([0, 1, 1, 4, -1, 4])
    assert abs(loss(z, w, labels, 0.1) - loss(z * scale_z, w * scale_w, labels, 0.1)) < 1e-10


@pytest.mark.parametrize("loss", [dpl_o, dpl_star])
@pytest.mark.parametrize("labels", [[-1, -1, -1], [2, 2, 2], [1, -1, -1]])
def test_nothing_to_contrast_gives_zero_and_zero_gradient(loss, labels: list[int]) -> None:
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    w = torch.randn(5, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    value = loss(z, w, torch.tensor(labels), 0.1)
    value.backward()
    assert value == 0
    assert not z.grad.any()
    assert not w.grad.any()


@pytest.mark.parametrize("loss", [dpl_o, dpl_star])
def test_no_overflow_at_a_small_temperature(loss) -> None:
    z = torch.randn(16, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
    w = -z.detach()[:4].clone()  # as far as cosine goes
    value = loss(z, w, torch.arange(16) % 4, 0.01)
    value.backward()
    assert value.isfinite()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_compute_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    z, w = torch.randn(2, 8, 16, generator=generator).to(dtype)
    labels = torch.arange(8) % 3
    expected = dpl_star(z.float(), w.float(), labels, 0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(dpl_star(z, w, labels, 0.01), expected, rtol=1e-5)
        assert torch.allclose(dpl_star(z.float(), w.float(), labels, 0.01), expected, rtol=1e-5)
        assert prototype_regularization(w.float(), z.float(), 0.01).dtype == torch.float32


def test_regularization_at_the_start_depends_on_the_prototypes_alone() -> None:
    w = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    tau = 0.1
    expected = (
        -sum(1 / tau - math.log(sum(math.exp(float(cosine(w[k], w[c])) / tau) for c in range(5))) for k in range(5)) / 5
    )
    assert abs(float(prototype_regularization(w, w.clone(), tau)) - expected) < 1e-10


def test_sampled_rows_estimate_the_regulariser_without_bias() -> None:
    w, memory = torch.randn(2, 50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    each = [float(prototype_regularization(w, memory, 0.1, torch.tensor([k]))) for k in range(50)]
    assert sum(each) / 50 == pytest.approx(float(prototype_regularization(w, memory, 0.1)))


def test_counts_classes() -> None:
    assert classes_present(torch.tensor([0, 0, 3, -1, 7, 3, 3])) == 3
    assert classes_present(torch.tensor([-1, -1])) == 0


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 7, 3)])
def test_adain_equals_its_equations(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(9)
    content, style = (torch.randn(shape, dtype=torch.float64, generator=generator) * 3 + 1 for _ in range(2))
    result = adain(content, style, 0.0)
    channels = shape[1] if len(shape) == 4 else shape[2]
    for b in range(shape[0]):
        for c in range(channels):
            fa, fb = (x[b, c] if len(shape) == 4 else x[b, :, c] for x in (content, style))
            mean_a, mean_b = fa.mean(), fb.mean()
            sigma_a, sigma_b = (((f - f.mean()) ** 2).mean().sqrt() for f in (fa, fb))
            expected = sigma_b * (fa - mean_a) / sigma_a + mean_b
            own = result[b, c] if len(shape) == 4 else result[b, :, c]
            assert (own - expected).abs().max() < 1e-10


def test_adain_with_its_own_style_changes_nothing() -> None:
    maps = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10))
    assert (adain(maps, maps) - maps).abs().max() < 1e-12


def test_adain_of_a_dead_channel_is_the_donor_mean() -> None:
    content, style = torch.zeros(1, 2, 4, 4), torch.rand(1, 2, 4, 4)
    result = adain(content, style)
    assert result.isfinite().all()
    assert torch.allclose(result, style.mean(dim=(2, 3), keepdim=True).expand_as(result))


def test_adain_statistics_carry_no_gradient_by_default() -> None:
    content = torch.randn(1, 2, 3, 3, dtype=torch.float64).requires_grad_()
    style = torch.randn(1, 2, 3, 3, dtype=torch.float64).requires_grad_()
    adain(content, style).sum().backward()
    assert style.grad is None
    assert torch.autograd.gradcheck(lambda a, b: adain(a, b, detach=False), (content, style))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"labels": torch.tensor([0.0, 1.0])}, "int64"),
        ({"labels": torch.tensor([0])}, "labels"),
        ({"prototypes": torch.randn(3, 5)}, r"\[C, d\]"),
    ],
)
def test_wrong_arguments_are_named(change, word: str) -> None:
    good = {
        "features": torch.randn(2, 4),
        "prototypes": torch.randn(3, 4),
        "labels": torch.tensor([0, 1]),
        "temperature": 0.1,
    }
    with pytest.raises((InputError, SettingError), match=word):
        dpl_star(**(good | change))
