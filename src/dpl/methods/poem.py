"""POEM: match the entropies of the stream to those of the source, by betting on how they differ.

Bar, Shaer, Romano, Protected Test-Time Adaptation via Online Entropy Matching: A Betting Approach, NeurIPS 2024. With F
the distribution function of the source model's entropies on source images (interpolated), each sample in turn gives

    u = F(H),    u' = 1/2 e u² + (1 - 1/2 e) u,    target t = F^-1(u'),    wealth <- wealth (1 + e (u - 1/2))
    e <- e + gamma g / sqrt(sum of g²),    g = (u - 1/2) / (1 + e (u - 1/2)); g = 0 where it would push |e| > D further

with the bet e = 0 at first. Without a shift u is uniform, the wealth does not grow, e stays near 0 and the targets are
the entropies themselves: nothing is learned. The step matches entropies to their targets, on reliable samples:

    L = 1/2 mean over {H_i < E0} of (c_i H_i - c_i t_i)²,    c_i = exp(E0 - H_i) without gradient

Updates: affine parameters of normalisation layers below the top (`frozen_modules`), with batch statistics. Needs: such
layers, and source images once (held out from training; their labels are not used), for F with running statistics.
Output: from before the update. The authors use SAR's learning rate: 1e-3 for a ViT with 64 images.
Departures from the authors' code: E0 is 0.4 ln C (theirs 0.4 ln 1000 for any C); a batch without a reliable sample
changes no weight; `reset` also forgets the bets; one pass serves the bets and the first step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective, Source
from dpl.methods.parts.norm_rules import RunningStatistics
from dpl.methods.parts.source_data import first_batches
from dpl.methods.parts.top_layers import TOP_LAYERS
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives import entropy, entropy_margin, masked_mean

__all__ = ["POEM", "POEMSettings", "interpolate"]


@dataclass(frozen=True, kw_only=True)
class POEMSettings(GradientSettings, norm="batch", optimizer="sgd"):
    """Settings of POEM."""

    pace: float = setting(1 / (8 * 3**0.5), "gamma: how fast the bet moves", low=0)
    largest_bet: float = setting(1.8, "D: a bet beyond it does not grow", low=0, high=2)
    margin: float = setting(0.4, "E0 as a share of ln C: samples with less entropy are reliable", low=0)
    weighted: bool = setting(True, "match reliable samples, by weight; False: all samples alike")
    first_images: int = setting(100, "images that are only predicted and bet on, before the first update", low=0)
    source_samples: int = setting(100_000, "source images after which F is ready", low=2)
    frozen_modules: tuple[str, ...] = setting(TOP_LAYERS, "modules whose parameters do not train")


@register(
    "poem",
    paper="Bar et al., Protected Test-Time Adaptation via Online Entropy Matching, NeurIPS 2024",
    updates="affine parameters of normalisation layers below the top",
    passes="1 forward, 1 backward",
    source="once",
)
class POEM(GradientMethod[POEMSettings]):
    """Entropy matching by betting."""

    settings_class = POEMSettings
    quantiles: Tensor  # entropies of the source, each once, in order; with the next line F
    probabilities: Tensor  # F at the quantiles
    bet: Tensor  # e
    squares: Tensor  # sum of g²
    log_wealth: Tensor
    seen: int  # images

    def __init__(self, network: Network, settings: POEMSettings) -> None:
        super().__init__(network, settings)
        zero = torch.zeros((), device=network.device, dtype=torch.promote_types(network.dtype, torch.float32))
        self.declare(quantiles=zero.expand(1).clone(), probabilities=zero.expand(1) + 1, seen=0)
        self.declare(bet=zero, squares=zero.clone(), log_wealth=zero.clone())

    @torch.no_grad()
    def prepare(self, source: Source | None) -> None:
        """Compute F."""
        batches = first_batches(self.require_source(source, "sar"), self.network, self.settings.source_samples)
        with self.network.norm.using(RunningStatistics()):
            found = [entropy(self.network(images).logits) for images, _ in batches]
        count = sum(map(len, found))
        quantiles, counts = torch.unique(torch.cat(found or [self.bet[None]]), return_counts=True)
        if len(quantiles) < 2:
            raise SettingError(f"source gave {count} images with one entropy; expected held-out images of the source")
        self.quantiles, self.probabilities = quantiles, counts.cumsum(dim=0).to(quantiles.dtype) / count

    def step(self, images: Tensor) -> Tensor:
        """Bet on each image, then match, `steps` times with the same targets."""
        targets = None
        for _ in range(self.settings.steps):
            with torch.enable_grad():
                out = self.forward(images)
                targets = self.targets(entropy(out.whole)) if targets is None else targets
                if self.seen < self.settings.first_images:
                    self.facts = {
                        "updated": False,
                        "reason": f"updates begin after {self.settings.first_images} images",
                    }
                    return out.whole
                self.update(self.matching(out, targets), out)
        self.facts |= {"bet": self.bet, "log_wealth": self.log_wealth}
        return self.answer(images, out.whole)

    @torch.no_grad()
    def targets(self, entropies: Tensor) -> Tensor:
        """Return t [B], and let bet and wealth follow sample by sample."""
        u = interpolate(entropies, self.quantiles, self.probabilities)
        bets = []
        for each in (u - 0.5).unbind():
            bets.append(self.bet)
            if self.seen:  # the first image of all is not bet on
                self._move_bet(each)
            self.seen += 1
        bet = torch.stack(bets)
        self.log_wealth = self.log_wealth + torch.log1p(bet * (u - 0.5)).sum()
        return interpolate(0.5 * bet * u**2 + (1 - 0.5 * bet) * u, self.probabilities, self.quantiles)

    def _move_bet(self, surprise: Tensor) -> None:
        too_far = (self.bet.abs() > self.settings.largest_bet) & (surprise * self.bet > 0)
        gradient = torch.where(too_far, 0, surprise / (1 + self.bet * surprise))
        self.squares = self.squares + gradient**2
        tiny = torch.finfo(self.squares.dtype).tiny
        self.bet = self.bet + self.settings.pace * gradient / self.squares.clamp(min=tiny).sqrt()

    def matching(self, out: Pass, targets: Tensor) -> Objective:
        """L."""
        margin, before = entropy_margin(out.reference, self.settings.margin), entropy(out.reference)
        distance = entropy(out.logits) - targets
        if not self.settings.weighted:
            return Objective(0.5 * distance.square().mean())
        reliable, weights = before < margin, (margin - before).exp()
        value = 0.5 * masked_mean((weights * distance).square(), reliable)
        return Objective(value, reliable.any(), {"selected": out.share(reliable)})


def interpolate(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Return the piecewise linear function through (places, values) at x; outside, its end values."""
    right = torch.searchsorted(places, x).clamp(1, len(places) - 1)
    share = (x - places[right - 1]) / (places[right] - places[right - 1])
    return torch.lerp(values[right - 1], values[right], share.clamp(0, 1))
