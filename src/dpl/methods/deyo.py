"""DeYO: entropy minimisation on samples whose prediction rests on the object's shape.

Lee et al., Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors, ICLR 2024.

    PLPD_i = p_i[y_i] - p'_i[y_i],  y_i = argmax p_i,  p' the prediction for the image with its patches shuffled
    S      = {i : H_i < tau_ent, PLPD_i > tau_plpd}
    L      = mean over S of (exp(E0 - H_i) + exp(PLPD_i)) H_i

with tau_ent = 0.5 ln C, E0 = 0.4 ln C, tau_plpd = 0.2 and 4 x 4 patches. Updates: affine parameters of normalisation
layers below the top (`frozen_modules`), with batch statistics. Needs: such layers, and images [B, C, H, W] (or an
`augment` that destroys the shape in other data). Output: from before the update. A batch without a selected sample
changes nothing. As in the authors' code only samples of low entropy run again, normalised by their own statistics.
Departures: the network is in evaluation mode (no dropout); patches of images that are not square are not square
either; the modules named in `frozen_modules` are looked for inside wrappers, and in no other place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError
from dpl.core.numerics import at_least_float32
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Objective
from dpl.methods.parts.top_layers import TOP_LAYERS
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Pass
from dpl.objectives import entropy, entropy_margin, masked_mean

__all__ = ["DeYO", "DeYOSettings", "permute_patches", "shuffle_patches"]


@dataclass(frozen=True, kw_only=True)
class DeYOSettings(GradientSettings, norm="batch"):
    """Settings of DeYO."""

    margin: float = setting(0.5, "tau_ent as a share of ln C: samples with less entropy are candidates", low=0)
    weight_margin: float = setting(0.4, "E0 as a share of ln C: less entropy than this counts more", low=0)
    plpd_threshold: float = setting(
        0.2, "tau_plpd: how much probability must be lost with the shape", low=-1, high=1, formerly="drop"
    )
    patches: int = setting(4, "patches along each side of an image", low=1)
    augment: Callable[[Tensor], Tensor] | None = setting(None, "what destroys the shape; None: shuffled patches")
    frozen_modules: tuple[str, ...] = setting(TOP_LAYERS, "modules whose parameters do not train", formerly="top")


@register(
    "deyo",
    paper="Lee et al., Entropy is not Enough for Test-Time Adaptation, ICLR 2024",
    updates="affine parameters of normalisation layers below the top",
    passes="2 forward, 1 backward",
    host_reads=1,
)
class DeYO(GradientMethod[DeYOSettings]):
    """Entropy of samples that need their shape."""

    settings_class = DeYOSettings

    def candidates(self, out: Pass) -> Tensor:
        """The reliable samples."""
        return entropy(out.reference) < entropy_margin(out.reference, self.settings.margin)

    def loss(self, out: Pass) -> Objective:
        """L over S."""
        s, entropies = self.settings, entropy(out.reference)
        reliable = self.candidates(out)
        drop = self._drop(out, reliable)
        selected = reliable & (drop > s.plpd_threshold)
        weights = (entropy_margin(out.reference, s.weight_margin) - entropies).exp() + drop.exp()
        return Objective(
            masked_mean(weights * entropy(out.logits), selected),
            selected.any(),
            {"reliable": out.share(reliable), "selected": out.share(selected)},
        )

    @torch.no_grad()
    def _drop(self, out: Pass, reliable: Tensor) -> Tensor:
        """PLPD [B] of the reliable, zero for the others."""
        # The rows must be known on the host: batch statistics are those of the reliable samples alone.
        rows = reliable.nonzero().flatten()
        top, labels = out.probabilities.max(dim=1)
        if len(rows) == 0:
            return torch.zeros_like(top)
        destroyed = at_least_float32(self.network(self._destroy(out.images[rows])).logits).softmax(dim=1)
        left = destroyed.gather(1, labels[rows, None]).squeeze(1)
        return torch.zeros_like(top).index_copy(0, rows, top[rows] - left)

    def _destroy(self, images: Tensor) -> Tensor:
        if self.settings.augment is not None:
            return self.view(images, self.settings.augment)
        return shuffle_patches(images, self.settings.patches, self.random.generator)


def shuffle_patches(images: Tensor, patches: int, generator: torch.Generator | None = None) -> Tensor:
    """Cut each image [B, C, H, W] into patches x patches and put them together in a random order of its own."""
    order = torch.rand(len(images), patches**2, generator=generator).to(images.device, non_blocking=True).argsort(dim=1)
    return permute_patches(images, patches, order)


def permute_patches(images: Tensor, patches: int, order: Tensor) -> Tensor:
    """Put patch `order[b, j]` of each image [B, C, H, W] at place j; patches count row by row."""
    if images.ndim != 4:
        raise InputError(
            f"images has shape {tuple(images.shape)}: expected [batch, channels, height, width] to shuffle patches of; "
            "for other data pass augment=, a function that destroys the shape"
        )
    size, n = images.shape[2:], patches
    height, width = (max(side // n, 1) for side in size)
    x = _resized(images, (n * height, n * width))
    x = x.reshape(*x.shape[:2], n, height, n, width).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [B, n n, C, h, w]
    x = x.gather(1, order[:, :, None, None, None].expand_as(x))
    x = x.reshape(len(x), n, n, *x.shape[2:]).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return _resized(x, (size[0], size[1]))


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True)
