"""The building blocks of the corruptions against slow, literal twins and against scipy."""

import colorsys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from dpl.data.corruptions import apply, blur, digital, spatter
from dpl.data.corruptions.arrays import filter_axes, gaussian_weights, zoom
from dpl.data.corruptions.constants import CIFAR, IMAGENET
from dpl.data.corruptions.frost import frost_texture
from dpl.data.corruptions.plasma import plasma


def random_floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


@pytest.mark.parametrize("reach", [1, 3])
def test_glass_shuffle_equals_the_loop_over_pixels(reach):
    height, width = 14, 11
    image = np.random.default_rng(5).integers(0, 256, (height, width, 3), dtype=np.uint8)
    source = blur._shuffle([np.random.default_rng(7)], height, width, reach)[0]
    rows, columns = range(reach + 1, height - reach + 1), range(reach + 1, width - reach + 1)
    steps = np.random.default_rng(7).integers(-reach, reach, size=(2, len(rows) * len(columns)))
    expected = image.copy()
    places = [(y, x) for y in rows for x in columns]
    for (y, x), (dx, dy) in reversed(list(zip(places, steps.T, strict=True))):
        # Literally a swap; on numpy rows it only copies, which is how the published images were made.
        expected[y, x], expected[y + dy, x + dx] = expected[y + dy, x + dx], expected[y, x]
    assert (image.reshape(-1, 3)[source].reshape(image.shape) == expected).all()


@pytest.mark.parametrize("strength", [*CIFAR["defocus_blur"], *IMAGENET["defocus_blur"]])
def test_defocus_equals_a_plain_correlation_with_the_disc(strength):
    images = np.random.default_rng(3).integers(0, 256, (1, 36, 30, 3), dtype=np.uint8)
    kernel = blur.disc(*strength)
    assert 1 - 1e-6 < kernel.sum() < 1.014
    expected = [ndimage.correlate(images[0, ..., c].astype(float), kernel, mode="mirror") for c in range(3)]
    assert blur.defocus_blur(images, [], *strength)[0] == pytest.approx(np.stack(expected, -1), abs=1e-2)


def test_the_disc_has_its_radius():
    assert blur.disc(1.5, 0.1) == pytest.approx(np.full((3, 3), 1 / 9), abs=1e-6)
    assert blur.disc(10, 0.5).shape == (21, 21)
    assert blur.disc(3, 0.1).shape == (7, 7)
    assert blur.disc(3, 0.1)[3] == pytest.approx(np.full(7, 1 / 29), abs=1e-6)


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("factor", [1.0, 1.01, 1.13, 1.25, 1.75, 4.5])
def test_zoom_equals_scipys(size, factor):
    image = random_floats(size, size)
    crop = int(np.ceil(size / factor))
    start = (size - crop) // 2
    large = ndimage.zoom(image[start : start + crop, start : start + crop], factor, order=1)
    trim = (len(large) - size) // 2
    zoomed = zoom(image[:, None], factor)[..., 0].T
    assert zoomed == pytest.approx(large[trim : trim + size, trim : trim + size], abs=1e-5)


def test_zoom_blur_is_the_mean_over_the_factors():
    images = np.random.default_rng(3).integers(0, 256, (2, 30, 20, 3), dtype=np.uint8)
    total, factors = images.astype(float), np.arange(1, 1.16, 0.05).tolist()
    for n, channel in np.ndindex(2, 3):
        plane = images[n, :, None, :, channel].astype(np.float32)
        total[n, ..., channel] += sum(zoom(plane, factor)[..., 0].T for factor in factors)
    assert blur.zoom_blur(images, [], 1.16, 0.05) == pytest.approx(total / (1 + len(factors)), abs=1e-3)


@pytest.mark.parametrize("shape", [(20, 31), (2, 20, 600)])  # by matrices, and too large for them
@pytest.mark.parametrize(
    ("sigma", "mode", "truncate"), [(0.4, "nearest", 4.0), (6, "nearest", 4.0), (40, "reflect", 3.0)]
)
def test_gaussian_equals_scipys(shape, sigma, mode, truncate):
    stack = random_floats(*shape)
    sigmas = (0,) * (len(shape) - 2) + (sigma, sigma)
    expected = ndimage.gaussian_filter(stack.astype(float), sigmas, mode=mode, truncate=truncate)
    assert filter_axes(stack, gaussian_weights(sigma, truncate), mode) == pytest.approx(expected, abs=1e-5)


def test_a_gaussian_of_no_width_changes_nothing():
    assert gaussian_weights(0) == (1.0,)


def test_motion_averages_along_the_ray():
    image = random_floats(1, 12, 15, 2)
    smeared = blur.smear(image, radius=2, sigma=1.5, angles=np.array([30], np.float32))
    weights = np.exp(-(np.arange(5) ** 2) / (2 * 1.5**2))
    offsets = [(0, 0), (0, 1), (1, 2), (1, 3), (2, 3)]  # (down, right): 0.5 and 0.866 pixels per tap, rounded
    expected = np.zeros((12, 15, 2))
    for y, x in np.ndindex(12, 15):
        for weight, (down, right) in zip(weights / weights.sum(), offsets, strict=True):
            expected[y, x] += weight * image[0, min(y + down, 11), min(x + right, 14)]
    assert smeared[0] == pytest.approx(expected, abs=1e-5)


def test_plasma_equals_the_point_by_point_construction():
    clouds = plasma([np.random.default_rng(2)], 13, 1.7)[0]
    size = 16
    noise = 2 * np.random.default_rng(2).random((size, size), dtype=np.float32) - 1
    expected, step, wibble = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        at = lambda y, x: expected[y % size, x % size]  # noqa: E731
        for y, x in np.ndindex(size // step, size // step):
            y, x = y * step, x * step
            corners = at(y, x) + at(y + step, x) + at(y, x + step) + at(y + step, x + step)
            expected[y + half, x + half] = corners / 4 + wibble**2 * noise[y + half, x + half]
        for y, x in np.ndindex(size // step, size // step):
            for py, px in ((y * step, x * step + half), (y * step + half, x * step)):
                around = at(py - half, px) + at(py + half, px) + at(py, px - half) + at(py, px + half)
                expected[py, px] = around / 4 + wibble**2 * noise[py, px]
        step, wibble = half, wibble / 1.7
    expected -= expected.min()
    assert clouds == pytest.approx(expected / expected.max(), abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, 255)] * 3), st.sampled_from([(1, 0.0), (0.3, 0.0), (2.5, 0.2)]), st.floats(0, 0.5))
def test_colour_changes_are_those_of_hsv(colour, saturation, shift):
    image = np.array(colour, np.uint8).reshape(1, 1, 1, 3)
    hue, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in colour))
    saturated = colorsys.hsv_to_rgb(hue, min(s * saturation[0] + saturation[1], 1), v)
    assert digital.saturate(image, [], *saturation).ravel() == pytest.approx(255 * np.array(saturated), abs=1e-2)
    brighter = colorsys.hsv_to_rgb(hue, s, min(v + shift, 1))
    assert apply._FUNCTIONS["brightness"](image, [], shift).ravel() == pytest.approx(255 * np.array(brighter), abs=1e-2)


@pytest.mark.parametrize(("repeat_edge", "mode"), [(True, "reflect"), (False, "mirror")])
def test_sampling_equals_map_coordinates(repeat_edge, mode):
    image = random_floats(1, 9, 12, 3)
    y, x = (60 * random_floats(2, 1, 9, 12) - 25).astype(np.float32)
    expected = [ndimage.map_coordinates(image[0, ..., c], [y[0], x[0]], order=1, mode=mode) for c in range(3)]
    assert digital.sample(image, y, x, repeat_edge=repeat_edge)[0] == pytest.approx(np.stack(expected, -1), abs=1e-4)


def test_elastic_corners_land_where_they_were_moved_to():
    back = digital._random_affine([np.random.default_rng(1)], 32, 40, 5.0)[0].astype(float)
    moves = 10 * np.random.default_rng(1).random((3, 2), dtype=np.float32) - 5
    corners = np.array([20, 16]) + 10 * np.array([[1, 1], [1, -1], [-1, -1]])
    assert np.c_[corners + moves, np.ones(3)] @ back == pytest.approx(corners, abs=1e-3)


def test_edges_are_those_of_a_square():
    image = np.zeros((2, 20, 20), np.uint8)
    image[0, 6:14, 6:14] = 200
    found = spatter.edges(image)
    assert not found[1].any()
    inside = ndimage.binary_fill_holes(found[0])
    assert inside.sum() == pytest.approx(64, abs=36)
    assert found[0].sum() == pytest.approx(4 * 8, abs=8)


@pytest.mark.parametrize("scale", [0.2, 1, 2])
def test_frost_textures_differ_and_continue_over_the_border(scale):
    textures = [frost_texture(number, scale).astype(int) for number in range(5)]
    assert len({texture.tobytes() for texture in textures}) == 5
    for texture in textures:
        assert texture.shape == (round(512 * scale), round(512 * scale), 3)
        for axis in (0, 1):
            seam = np.abs(texture.take(0, axis) - texture.take(-1, axis)).mean()
            assert seam < 2 * np.abs(np.diff(texture, axis=axis)).mean()
        assert 90 < texture.mean() < 170
        assert texture.std() > 45
