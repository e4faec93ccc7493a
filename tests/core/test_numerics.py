"""Mean and variance equal those of torch, with their gradients, in every layout and precision."""

import pytest
import torch
from torch import Tensor

from conformance.operations import HostReads
from dpl.core.numerics import read_together, variance_and_mean


def maps(dtype: torch.dtype = torch.float64, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    drawn = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (3 + 2 * drawn).to(dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dims", [(0, 2, 3), (2, 3), (1,)])
@pytest.mark.parametrize("correction", [0, 1])
def test_values_equal_those_of_torch(layout: torch.memory_format, dims: tuple[int, ...], correction: int) -> None:
    for own, other in zip(
        variance_and_mean(maps(layout=layout), dims, correction),
        torch.var_mean(maps(), dim=dims, correction=correction, keepdim=True),
        strict=True,
    ):
        assert torch.allclose(own, other, rtol=1e-12)


@pytest.mark.parametrize("correction", [0, 1])
def test_gradients_equal_finite_differences(correction: int) -> None:
    assert torch.autograd.gradcheck(lambda x: variance_and_mean(x, (0, 2, 3), correction), maps().requires_grad_())


def test_the_variance_is_accurate_at_a_large_mean() -> None:
    far = maps(torch.float32) + 4096
    variance, _ = variance_and_mean(far, (0, 2, 3))
    exact = torch.var_mean(far.double(), dim=(0, 2, 3), correction=0, keepdim=True)[0]
    assert torch.allclose(variance.double(), exact, rtol=1e-3)


def test_half_precision_is_computed_in_float32() -> None:
    variance, mean = variance_and_mean(maps(torch.bfloat16), (0, 2, 3))
    assert variance.dtype == mean.dtype == torch.float32


def test_numbers_of_all_kinds_are_read_together_without_losing_a_digit() -> None:
    kinds = {"a": torch.tensor([0.1, 3.0]), "b": torch.tensor(7), "c": torch.tensor([[True], [False]])}
    kinds |= {"d": torch.tensor(1 / 3, dtype=torch.float64), "e": torch.empty(0)}
    read = read_together(**kinds)
    assert read == {name: value.flatten().tolist() for name, value in kinds.items()}
    assert read_together() == {}
    with HostReads() as host:
        read_together(**{name: value.to("meta") for name, value in kinds.items()})
    assert host.reads.total() == 1
