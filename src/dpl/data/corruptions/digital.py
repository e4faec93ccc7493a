"""Digital: contrast, elastic deformation, pixelation, JPEG and saturation."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpl.data.corruptions.arrays import Floats, Images, Rngs, filter_axes, gaussian_weights, uniform

__all__ = ["contrast", "elastic_transform", "jpeg_compression", "pixelate", "sample", "saturate"]


def contrast(images: Images, rngs: Rngs, factor: float) -> Floats:
    """Pull every channel towards its mean over the image."""
    mean: Floats = images.mean(axis=(1, 2), keepdims=True, dtype=np.float64).astype(np.float32)
    return (images - mean) * np.float32(factor) + mean


def saturate(images: Images, rngs: Rngs, factor: float, shift: float) -> Floats:
    """Change the S of HSV to S * factor + shift; a grey pixel has hue 0 and turns reddish when `shift` is not 0."""
    pixels = images.astype(np.float32)
    value = pixels.max(axis=3, keepdims=True)
    depth = value - pixels  # V * S * (a number between 0 and 1 that only the hue decides)
    chroma = depth.max(axis=3, keepdims=True)
    saturation = np.clip(chroma / np.maximum(value, 1) * factor + shift, 0, 1)
    hue = np.where(chroma > 0, depth / np.maximum(chroma, 1), np.array([0, 1, 1], dtype=np.float32))
    result: Floats = value * (1 - saturation * hue)
    return result


def _each(images: Images, change: Callable[[Image.Image], Image.Image]) -> Floats:
    changed = [np.asarray(change(Image.fromarray(image))) for image in images]
    return np.stack(changed).astype(np.float32)


def jpeg_compression(images: Images, rngs: Rngs, quality: float) -> Floats:
    """Write as JPEG of this quality and read back."""

    def recode(image: Image.Image) -> Image.Image:
        buffer = BytesIO()
        image.save(buffer, "JPEG", quality=int(quality))
        return Image.open(buffer)

    return _each(images, recode)


def pixelate(images: Images, rngs: Rngs, factor: float) -> Floats:
    """Shrink by `factor` and enlarge again, both by box averages."""
    height, width = images.shape[1:3]
    small = (max(int(width * factor), 1), max(int(height * factor), 1))
    box = Image.Resampling.BOX
    return _each(images, lambda image: image.resize(small, box).resize((width, height), box))


def elastic_transform(images: Images, rngs: Rngs, strength: float, sigma: float, affine: float) -> Floats:
    """Move three corners by up to `affine` pixels, then each pixel along a smooth random field.

    The field is uniform noise, smoothed by a Gaussian of `sigma` pixels and multiplied by `strength`.
    """
    height, width = images.shape[1:3]
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    to_source = _random_affine(rngs, height, width, affine)[:, :, :, None, None]  # [N, 3, 2, 1, 1]
    x, y = (columns * to_source[:, 0, k] + rows * to_source[:, 1, k] + to_source[:, 2, k] for k in (0, 1))
    warped = sample(images.astype(np.float32), y, x, repeat_edge=False)
    field = uniform(rngs, -1, 1, (2, height, width))
    shift = np.float32(strength) * filter_axes(field, gaussian_weights(sigma, truncate=3.0), "reflect")
    return sample(warped, rows + shift[:, 1], columns + shift[:, 0], repeat_edge=True)


def _random_affine(rngs: Rngs, height: int, width: int, reach: float) -> Floats:
    """Return maps [N, 3, 2] from a place (x, y, 1) of the result to the place (x, y) in the image it comes from."""
    centre, arm = np.array([width // 2, height // 2]), min(height, width) // 3
    corners = centre + arm * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + uniform(rngs, -reach, reach, (3, 2)).astype(float)
    homogeneous = np.concatenate([moved, np.ones((len(rngs), 3, 1))], axis=2)
    return np.linalg.solve(homogeneous, np.broadcast_to(corners.astype(float), moved.shape)).astype(np.float32)


def sample(images: Floats, y: Floats, x: Floats, *, repeat_edge: bool) -> Floats:
    """Read images [N, H, W, C] at real coordinates [N, H, W], bilinearly, mirrored beyond the border.

    `repeat_edge` mirrors about the border itself, so that the edge pixel comes twice; otherwise about the edge pixel.
    """
    count, height, width, channels = images.shape
    top, left = np.floor(y), np.floor(x)
    down, right = (y - top)[..., None], (x - left)[..., None]
    rows = [_fold(top.astype(np.intp) + k, height, repeat_edge) for k in (0, 1)]
    columns = [_fold(left.astype(np.intp) + k, width, repeat_edge) for k in (0, 1)]
    first = np.arange(count)[:, None, None] * height
    flat = images.reshape(-1, channels)
    corners = [[flat[(first + row) * width + column] for column in columns] for row in rows]
    upper, lower = (a + right * (b - a) for a, b in corners)
    result: Floats = upper + down * (lower - upper)
    return result


def _fold(index: NDArray[np.intp], size: int, repeat_edge: bool) -> NDArray[np.intp]:
    """Bring any whole number into 0..size-1 by mirroring."""
    period = 2 * size if repeat_edge else 2 * size - 2
    index = index % period
    return np.minimum(index, period - index - int(repeat_edge))
