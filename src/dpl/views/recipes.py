"""The views that the compared methods train with: images in [0, 1] in, images of the same size out.

Each function returns a callable that draws from torch's global generator; `seeded` fixes and undoes its draws. With
`per_sample=True` every image gets its own factors. `per_sample=False` draws them once for the whole batch, as the
authors' code does for CoTTA, RoTTA, RMT and ROID (AdaContrast's augments images one by one). The order of the colour
changes is drawn once for a batch in either case.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import InputError
from dpl.core.numerics import at_least_float32, without_autocast
from dpl.views.augmix import augmix
from dpl.views.colour import colour_jitter, saturation
from dpl.views.draw import Draw, View
from dpl.views.geometry import SamplingGrid, blur, centred, random_resized_crop, sample, wander, zoomed_crop

__all__ = [
    "adacontrast_strong_view",
    "adacontrast_weak_view",
    "check_images",
    "cotta_view",
    "memo_view",
    "rmt_view",
    "roid_view",
]

_LARGE = 96  # pixels a side from which "auto" crops: AdaContrast's authors crop photographs but not CIFAR images

_OVERSHOOT = 0.5  # beyond [0, 1], from resampling and noise; it is clipped


def cotta_view(*, per_sample: bool = True) -> View:
    """Return the view of CoTTA, RoTTA and RMT: colour, a small warp over continued borders, blur, flip, noise."""

    def view(images: Tensor, draw: Draw) -> Tensor:
        images = _sampled_warp(_five_colours(images, draw), draw, "border", margin=2)
        images = blur(images, draw.uniform(0.001, 0.5), radius=2)
        return images + 0.005 * draw.noise(images.shape)

    return _on_images(view, per_sample)


def rmt_view(*, per_sample: bool = True) -> View:
    """Return the view of RMT, which is CoTTA's."""
    return cotta_view(per_sample=per_sample)


def roid_view(*, per_sample: bool = True) -> View:
    """Return the view of ROID: CoTTA's colours, warp (over mirrored borders) and flip, without blur and noise."""

    def view(images: Tensor, draw: Draw) -> Tensor:
        return _sampled_warp(_five_colours(images, draw), draw, "reflection", margin=0)

    return _on_images(view, per_sample)


def adacontrast_weak_view(*, crop: bool | None = None, per_sample: bool = True) -> View:
    """Return AdaContrast's weak view: a random crop out of the image enlarged by 8/7 (256 to 224 pixels), and a flip.

    `crop=None` crops from 96 pixels a side on; the authors do not crop CIFAR and ImageNet-C (`crop=False`).
    """

    def view(images: Tensor, draw: Draw) -> Tensor:
        places = zoomed_crop(images, draw, 8 / 7) if _crops(crop, images) else centred(images)
        return sample(images, places.flip(draw.chance(0.5)))

    return _on_images(view, per_sample)


def adacontrast_strong_view(*, crop: bool | None = None, per_sample: bool = True) -> View:
    """Return AdaContrast's strong view, that of MoCo v2: a resized crop, colour, grey, blur, flip.

    `crop=None` crops from 96 pixels a side on; the authors do not crop CIFAR and ImageNet-C (`crop=False`).
    """

    def view(images: Tensor, draw: Draw) -> Tensor:
        places = random_resized_crop(images, draw, 0.2) if _crops(crop, images) else centred(images)
        images = _maybe_coloured(sample(images, places.flip(draw.chance(0.5))), draw)
        images = saturation(images, (~draw.chance(0.2)).to(images.dtype))  # a saturation of zero is grey
        sigma = torch.where(draw.chance(0.5), draw.uniform(0.1, 2), 0.001)  # so narrow that nothing is blurred
        return blur(F.pad(images, (6, 6, 6, 6), mode="replicate"), sigma, radius=6)

    return _on_images(view, per_sample)


def memo_view(*, crop: bool | None = None, per_sample: bool = True) -> View:
    """Return the view of MEMO: a crop (of the image continued by 4 pixels), a flip, and AugMix.

    From 96 pixels a side on (`crop=None`) the crop is a resized one of at least 8 % of the image, as for ImageNet.
    """

    def view(images: Tensor, draw: Draw) -> Tensor:
        if _crops(crop, images):
            places = random_resized_crop(images, draw, 0.08)
        else:
            grid, (right, down) = centred(images), (draw.uniform(-4.5, 4.5).round()[:, 0] for _ in range(2))
            places = SamplingGrid(grid.x + right, grid.y + down)
        return augmix(sample(images, places.flip(draw.chance(0.5))), draw)

    return _on_images(view, per_sample)


def _five_colours(images: Tensor, draw: Draw) -> Tensor:
    factors = {
        "brightness": draw.uniform(0.6, 1.4),
        "contrast": draw.uniform(0.7, 1.3),
        "saturation": draw.uniform(0.5, 1.5),
        "hue": draw.uniform(-0.06, 0.06),
        "gamma": draw.uniform(0.7, 1.3),
    }
    return colour_jitter(images, factors)


def _maybe_coloured(images: Tensor, draw: Draw) -> Tensor:
    """Jitter the colours of 80 % of the images."""
    chosen = draw.chance(0.8)
    factors = {
        name: torch.where(chosen, draw.uniform(0.6, 1.4), 1) for name in ("brightness", "contrast", "saturation")
    }
    return colour_jitter(images, factors | {"hue": torch.where(chosen, draw.uniform(-0.1, 0.1), 0)})


def _sampled_warp(images: Tensor, draw: Draw, outside: str, margin: int) -> Tensor:
    """Turn by up to 15 degrees, shift by up to an eighth, scale by up to a tenth, flip half of the images."""
    places: SamplingGrid = wander(images, draw, degrees=15, shift=1 / 8, scale=(0.9, 1.1), margin=margin)
    return sample(images, places.flip(draw.chance(0.5)), "border" if outside == "border" else "reflection")


def _crops(crop: bool | None, images: Tensor) -> bool:
    return min(images.shape[-2:]) >= _LARGE if crop is None else crop


def _on_images(view: Callable[[Tensor, Draw], Tensor], per_sample: bool) -> View:
    """Make a view of checked images, computed in float32 or better, without gradient."""

    @torch.no_grad()
    def on_images(images: Tensor) -> Tensor:
        if images.device.type == "cpu":  # elsewhere the host would wait; the model checks once a batch
            check_images(images)
        with without_autocast(images.device):
            wide = at_least_float32(images).clamp(0, 1).contiguous()  # each colour is worked on by itself
            return view(wide, Draw(wide, per_sample=per_sample)).clamp(0, 1).to(images.dtype)

    return on_images


def check_images(images: Tensor, bounds: tuple[float, ...] | None = None) -> None:
    """Refuse what cannot be an image, or was normalised outside the network: clipping would destroy it silently.

    `bounds` are the lowest and the highest value, where they are known.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise InputError(
            f"images has shape {tuple(images.shape)} and dtype {images.dtype}: the built-in views expect floating "
            "point [batch, channels, height, width]; pass augment= for other inputs"
        )
    if bounds is None:
        bounds = tuple(torch.stack(images.aminmax()).tolist())
    low, high = bounds
    if low < -_OVERSHOOT or high > 1 + _OVERSHOOT:
        raise InputError(
            f"images range from {low:.3g} to {high:.3g}: the built-in views expect [0, 1]; normalise inside "
            "the model (dpl.backbones.Normalized) or pass augment="
        )
