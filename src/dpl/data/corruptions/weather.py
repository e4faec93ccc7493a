"""Weather: snow, frost, fog and brightness."""

import numpy as np

from dpl.data.corruptions.arrays import Floats, Images, Rngs, draw, to_bytes, uniform, zoom
from dpl.data.corruptions.blur import smear
from dpl.data.corruptions.frost import frost_crops
from dpl.data.corruptions.plasma import plasma

__all__ = ["GREY", "brightness", "fog", "frost", "snow"]

GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # how bright red, green and blue look


def snow(
    images: Images,
    rngs: Rngs,
    mean: float,
    spread: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Floats:
    """Whiten the image and add two layers of smeared flakes, the second being the first turned by 180 degrees."""
    height, width = images.shape[1:3]
    flakes = mean + spread * draw(rngs, lambda rng: rng.standard_normal((height, width), dtype=np.float32))
    flakes = zoom(flakes.transpose(1, 0, 2), size).transpose(2, 1, 0)
    layer = to_bytes(255 * np.where(flakes < threshold, 0, flakes))[..., None].astype(np.float32)
    layer = np.rint(smear(layer, radius, sigma, uniform(rngs, -135, -45, ())))
    pixels = images.astype(np.float32)
    whitened = np.maximum(pixels, (pixels @ GREY)[..., None] * 1.5 + 127.5)
    result: Floats = keep * pixels + (1 - keep) * whitened + layer + layer[:, ::-1, ::-1]
    return result


def frost(images: Images, rngs: Rngs, keep: float, weight: float, scale: float) -> Floats:
    """Add a random crop of a frost texture.

    The benchmark uses five photographs of frost; these are replaced by five textures computed in `frost.py`. Results
    on this type are therefore close to, and not the same as, those on the published images.
    """
    crops = frost_crops(rngs, images.shape[1], images.shape[2], scale)
    return keep * images + weight * crops


def fog(images: Images, rngs: Rngs, thickness: float, decay: float) -> Floats:
    """Add a cloud map and scale back, so that the brightest value stays what it was."""
    height, width = images.shape[1:3]
    clouds = plasma(rngs, max(height, width), decay)[:, :height, :width, None]
    brightest = images.max(axis=(1, 2, 3), keepdims=True).astype(np.float32)
    result: Floats = (images + 255 * thickness * clouds) * brightest / (brightest + 255 * thickness)
    return result


def brightness(images: Images, rngs: Rngs, shift: float) -> Floats:
    """Raise the V of HSV by `shift`; hue and saturation stay, so all three channels grow by one factor."""
    pixels = images.astype(np.float32)
    value = pixels.max(axis=3, keepdims=True)
    raised = np.minimum(value + np.float32(255 * shift), 255)
    return np.asarray(np.where(value > 0, pixels * (raised / np.maximum(value, 1)), raised))
