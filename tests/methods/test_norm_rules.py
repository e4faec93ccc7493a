"""Rules of `norm` beside running and batch statistics: every promise of a method holds with them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dpl
from dpl.core.errors import SettingError
from dpl.testing import CHECKS, Subject
from nets import images, network

BATCHES = [images(8, seed=i) for i in range(5)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("norm", ["median", "unmix", "renorm"])
def test_promise(norm: str, check: Callable[[Subject], None]) -> None:
    check(Subject("tent", network("batch"), BATCHES, {"norm": norm}))


@pytest.mark.parametrize("norm", ["unmix", "renorm"])
@pytest.mark.parametrize("method", ["norm", "cotta"])
def test_reset_is_exact_with_and_without_a_teacher(method: str, norm: str) -> None:
    settings = {"norm": norm} | ({"views": 2} if method == "cotta" else {})
    CHECKS[0](Subject(method, network("batch"), BATCHES, settings), 10)


@pytest.mark.parametrize("norm", ["unmix", "renorm"])
def test_a_network_without_batch_norm_works(norm: str) -> None:
    plain, stirred = (dpl.adapt(network("group"), "tent", norm=n) for n in ("running", norm))
    for batch in BATCHES[:3]:
        assert torch.equal(plain(batch), stirred(batch))


def test_one_extreme_sample_hardly_moves_the_median() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(192, 5)).eval()
    extreme = torch.cat([images(7), torch.full((1, 3, 8, 8), 50.0)])
    centres = {}
    for norm in ("median", "batch"):
        adaptive = dpl.adapt(plain, "norm", norm=norm)
        with adaptive.network.norm.recording() as used:
            adaptive.predict(extreme)
        centres[norm] = next(iter(used.values()))[0]
    assert (centres["median"] - 0.5).abs().max() < 0.2
    assert (centres["batch"] - 0.5).min() > 5


def test_an_unknown_rule_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(SettingError, match=r"'median'.*'unmix'.*'renorm'"):
        dpl.adapt(network("batch"), "tent", norm="mean")
