"""DeYO against traces of its authors' code and of the RMT library."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from dpl.methods.deyo import permute_patches
from parity.tiny import compare, stream, tiny_network, trace

SGD = {"optimizer": "sgd", "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "deyo_official": SGD,
    "deyo_official_empty": {**SGD, "plpd_threshold": 0.984},
    "deyo_official_pixel": {"optimizer": "sgd", "lr": 0.005, "plpd_threshold": 0.3},
    "rmtlib_deyo": {},
    "rmtlib_deyo_occ": {},
}


def destruction(name: str) -> Callable[[Tensor], Tensor]:
    """What destroyed the shape in the traced run; the k-th call is for the candidates of batch k."""
    recorded, batches = trace(name), iter(range(12))

    def patches(images: Tensor) -> Tensor:
        order = torch.from_numpy(recorded["init/perm"][next(batches)][: len(images)]).long()
        return permute_patches(images, 4, order)

    def pixels(images: Tensor) -> Tensor:
        return images.flatten(2)[..., torch.from_numpy(recorded["init/pixel_perm"][next(batches)]).long()].view_as(
            images
        )

    def occlusion(images: Tensor) -> Tensor:
        hidden = images.clone()
        hidden[:, :, 4:12, 4:12] = images.mean(dim=(2, 3), keepdim=True)
        return hidden

    return pixels if name.endswith("pixel") else occlusion if name.endswith("occ") else patches


def adapted(name: str) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(), "deyo", augment=destruction(name), **CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_trace(name: str) -> None:
    difference = compare(name, adapted(name))
    assert difference["logits"] < 1e-9
    assert difference["state"] < 1e-9


@pytest.mark.parametrize("name", ["deyo_official", "deyo_official_empty"])
def test_losses_and_selection_equal_the_trace(name: str) -> None:
    adaptive, losses, selected, expected = adapted(name), [], [], trace(name)
    for images in stream():
        adaptive(images)
        losses.append(adaptive.last.loss if adaptive.last.updated else np.nan)
        selected.append(round(adaptive.last.selected * 32))
    np.testing.assert_allclose(losses, expected["loss"][:, 0], rtol=1e-9)
    assert selected == expected["batch/selected"].sum(axis=1).tolist()
