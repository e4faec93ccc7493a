"""FOA and its evolution strategy against traces of its authors' code, which uses pycma."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpl
from dpl.core.errors import MissingExtraError
from dpl.core.extras import optional
from parity.tiny import DATA, largest_state_difference, logits_difference, source_batches, stream, trace

try:
    timm = optional("timm", "bench")
except MissingExtraError as error:
    pytest.skip(str(error), allow_module_level=True)


class Vision(nn.Module):
    """The traced transformer behind its normaliser."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm.models.vision_transformer.VisionTransformer(
            img_size=16, patch_size=4, num_classes=10, embed_dim=24, depth=3, num_heads=2, mlp_ratio=2.0
        )
        self.vit.load_state_dict(load_file(DATA / "vit.safetensors"))

    def forward(self, images: Tensor) -> Tensor:
        return self.vit((images - 0.5) / 0.25)


def adapted(**settings: Any) -> dpl.AdaptiveModel:
    return dpl.adapt(Vision().eval().double(), "foa", source=source_batches(), **settings)


def numpy_eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of an eigenvector is a convention of the library."""
    values, vectors = np.linalg.eigh(matrix.numpy())
    return torch.from_numpy(values), torch.from_numpy(vectors)


def test_equals_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive, expected = adapted(), trace("foa")
    method: Any = adaptive.method
    rng, ask, recorded, asked = np.random.RandomState(2020), method.strategy.ask, iter(expected["final/asked"]), []

    def ask_as_recorded(draws: Tensor) -> Tensor:
        """Eigenvalues of the first generations are nearly equal, so that rounding turns candidates by up to 1e-9."""
        asked.append((ask(draws), torch.from_numpy(next(recorded))))
        return asked[-1][1]

    monkeypatch.setattr(method, "draw", lambda shape: torch.from_numpy(rng.randn(*shape)))
    monkeypatch.setattr(method.strategy, "ask", ask_as_recorded)
    monkeypatch.setattr(torch.linalg, "eigh", numpy_eigenvectors)
    method.prompt = torch.from_numpy(expected["init/prompts"][0])
    outputs, sigmas, means, prompts, averages, fitness = [], [], [], [], [], []
    for images in stream()[: len(expected["final/asked"])]:
        outputs.append(adaptive(images).numpy())
        sigmas.append(float(method.strategy.sigma))
        means.append(method.strategy.mean.numpy())
        prompts.append(method.prompt.numpy().ravel())
        averages.append(method.average.numpy())
        fitness.append(adaptive.last.fitness)
    assert all((own - theirs).abs().max() < 1e-8 for own, theirs in asked)
    assert logits_difference("foa", np.stack(outputs), expected["logits"][: len(outputs)]) < 1e-9
    assert largest_state_difference("foa", {"prompts": torch.from_numpy(prompts[0])}) < 1e-9
    found = {"sigma": sigmas, "cma_mean": means, "best_prompt": prompts, "hist_stat": averages}
    for key, own in found.items():
        np.testing.assert_allclose(own, expected[f"batch/{key}"][: len(own)], atol=1e-9)
    np.testing.assert_allclose(fitness, expected["batch/fitness"].min(axis=1)[: len(fitness)], atol=1e-9)


def test_shifting_alone_equals_the_trace() -> None:
    adaptive = adapted(prompts=0)
    assert logits_difference("foa_shift", np.stack([adaptive(images).numpy() for images in stream()])) < 1e-9


def test_statistics_of_the_source_equal_the_trace() -> None:
    state, expected = adapted().state_dict(), trace("foa")
    np.testing.assert_allclose(state["method.source_mean"], expected["init/train_mean"], atol=1e-9)
    np.testing.assert_allclose(state["method.source_std"], expected["init/train_std"], atol=1e-9)
