"""FOA: adapt a vision transformer by forward passes alone, through prompts found by an evolution strategy.

Niu et al., Test-Time Model Adaptation with Only Forward Passes, ICML 2024. Prompts are tokens put behind the class
token. With features f the class token after each block (normalised as the next block does it), CMA-ES minimises

    sum_i H_i + lambda B/64 (|std f - std_s|² + |mean f - mean_s|²)

over B images, std_s and mean_s those of source images without prompts. Each batch tries 27 candidates of the strategy
and the best prompts of the batch before. The best of them predict, with their last features z shifted to the source:

    logits = classifier(z + mean_s - m),    m <- 0.9 m + 0.1 mean z over all candidates (after use)

Updates: the prompts; no weight changes, no backward pass is made, and quantised networks work. `prompts=0` only shifts.
Needs: a vision transformer (timm, torchvision, Hugging Face) with a class token and a linear classifier, and source
images once (labels are not used). Output: of the best candidate. lambda is 0.2 for ImageNet-R.
Departures from the authors' code: any width and number of blocks (theirs: 768); the first prompts have torch's usual
scale of a linear layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import Method, Source
from dpl.methods.parts.cma_es import CMAES
from dpl.methods.parts.source_data import first_batches
from dpl.methods.parts.token_blocks import TokenBlocks
from dpl.methods.registry import register
from dpl.methods.settings import Settings
from dpl.network import Network
from dpl.objectives import entropy

__all__ = ["FOA", "FOASettings"]


@dataclass(frozen=True, kw_only=True)
class FOASettings(Settings):
    """Settings of FOA."""

    prompts: int = setting(3, "prompt tokens; 0: only shift the features", low=0)
    population: int = setting(27, "candidates of the evolution strategy for each batch", low=4)
    sigma: float = setting(1.0, "first step size of the strategy", low=1e-6)
    fitness_weight: float = setting(0.4, "lambda: weight of the features' statistics", low=0)
    momentum: float = setting(0.9, "share of the old average feature that stays", low=0, high=1)
    source_samples: int = setting(100_000, "source images after which their statistics are ready", low=2)


@register(
    "foa",
    paper="Niu et al., Test-Time Model Adaptation with Only Forward Passes, ICML 2024",
    updates="prompts (no weight of the network)",
    passes="28 forward",
    needs_classifier=True,
    source="once",
    min_batch=2,
)
class FOA(Method[FOASettings]):
    """Forward-only adaptation of prompts."""

    settings_class = FOASettings
    prompt: Tensor  # the best of the last batch, [P, d]
    strategy: CMAES
    source_mean: Tensor  # of the features of all blocks [L d]
    source_std: Tensor
    average: Tensor | None  # m, [d]

    def __init__(self, network: Network, settings: FOASettings) -> None:
        super().__init__(network, settings)
        self.tokens = TokenBlocks(network.module)
        width = network.classifier.in_features
        drawn = torch.rand(settings.prompts, width, generator=self.random.generator, dtype=torch.float64)
        drawn = ((2 * drawn - 1) * width**-0.5).to(network.device)
        unknown = torch.zeros(self.tokens.count * width, device=network.device, dtype=network.dtype)
        self.declare(prompt=drawn, source_mean=unknown, source_std=unknown.clone(), average=None)
        if settings.prompts:
            size = settings.prompts * width
            self.declare_part("strategy", CMAES(size, settings.population, settings.sigma, network.device))

    @torch.no_grad()
    def prepare(self, source: Source | None) -> None:
        """Compute the statistics of the source's features."""
        if source is None:
            raise SettingError("'foa' needs source images: pass source=; without source data use 'lame' or 't3a'")
        batches = first_batches(source, self.network, self.settings.source_samples)
        found = [self._run(images, None)[0] for images, _ in batches]
        if sum(map(len, found)) < 2:
            raise SettingError("source gave fewer than two images; their deviation is needed")
        self.source_std, self.source_mean = torch.std_mean(torch.cat(found), dim=0)

    @torch.no_grad()
    def step(self, images: Tensor) -> Tensor:
        """Try all candidates, predict with the best, and let the strategy learn."""
        tried = self._candidates()
        runs = [self._run(images, candidate) for candidate in tried]
        z = torch.stack([run[1] for run in runs])
        fitness = torch.stack([self._fitness(features, logits) for features, _, logits in runs])
        best = fitness.argmin()[None]
        logits = self._shifted(z.index_select(0, best)[0])
        mean = z.mean(dim=(0, 1))
        self.average = mean if self.average is None else torch.lerp(mean, self.average, self.settings.momentum)
        self.facts = {"updated": self.settings.prompts > 0, "fitness": fitness.min()}
        if self.settings.prompts == 0:
            self.facts["reason"] = "features are shifted; nothing is trained"
            return logits
        points = torch.stack([candidate.flatten() for candidate in tried if candidate is not None])
        self.strategy.tell(points, fitness.double(), foreign=1)
        self.prompt = points.index_select(0, best)[0].view_as(self.prompt)
        return logits

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the prompts found last; before the first batch, as the source network."""
        if self.average is None:
            return super().predict(images)
        return self._shifted(self._run(images, self.prompt)[1])

    def _candidates(self) -> list[Tensor | None]:
        """Return what the strategy asks for, and the best of the last batch."""
        if self.settings.prompts == 0:
            return [None]
        asked = self.strategy.ask(self.draw((self.settings.population, self.prompt.numel())))
        return [*(candidate.view_as(self.prompt) for candidate in asked), self.prompt]

    def draw(self, shape: tuple[int, int]) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(shape, generator=self.random.generator, dtype=torch.float64).to(self.network.device)

    def _fitness(self, features: Tensor, logits: Tensor) -> Tensor:
        std, mean = torch.std_mean(features, dim=0)
        gap = (std - self.source_std).square().sum() + (mean - self.source_mean).square().sum()
        return self.settings.fitness_weight * gap * len(features) / 64 + entropy(logits).sum()

    def _shifted(self, z: Tensor) -> Tensor:
        shift = 0 if self.average is None else (self.source_mean[-z.shape[1] :] - self.average).to(z.dtype)
        return self.network.classifier(z + shift)  # type: ignore[no-any-return]

    def _run(self, images: Tensor, prompt: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of all blocks [B, L d], those before the classifier [B, d], and the logits."""
        with self.tokens.prompted(prompt) as seen:
            out = self.network(images)
        return torch.cat([*seen, at_least_float32(out.z)], dim=1), out.z, out.logits
