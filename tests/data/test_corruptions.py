"""The corruptions against slow, literal twins, their published facts, and fixed figures."""

import colorsys
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from dpl.backbones import create
from dpl.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES, apply, blur, corrupt, digital, spatter
from dpl.data.corruptions.arrays import gaussian_matrix, separable, zoom_matrix
from dpl.data.corruptions.constants import CIFAR, IMAGENET
from dpl.data.corruptions.frost import frost_texture
from dpl.data.corruptions.plasma import plasma
from dpl.errors import InputError, SettingError

ALL = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur")
# Where the published strengths do not grow from one severity to the next, or one of several shrinks while another grows.
NOT_MONOTONE = {"glass_blur", "motion_blur", "frost", "elastic_transform", "spatter", "saturate"}
GOLDEN = Path(__file__).with_name("corruptions_golden.json")
SHARED = Path("/work/shared/data")
needs_shared = pytest.mark.skipif(not (SHARED / "cifar10_test.npz").exists(), reason="development images absent")


def picture(count: int = 1, height: int = 32, width: int = 32) -> np.ndarray:
    """Coloured waves with a black and a white block: smooth parts, edges, and both ends of the range."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(2 * np.pi * (f * x + g * y) + p) for f, g, p in ((1, 2, 0), (3, 1, 1), (2, 2, 2))]
    image = (127 + 90 * np.stack(waves, axis=-1)).astype(np.uint8)
    image[: height // 4, : width // 4], image[-height // 4 :, -width // 4 :] = 0, 255
    return np.stack([np.roll(image, 3 * n, axis=1) for n in range(count)])


def random_floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


@pytest.mark.parametrize("strengths", [CIFAR, IMAGENET])
def test_every_corruption_has_five_strengths_that_fit_its_function(strengths):
    assert set(strengths) == set(ALL) == set(apply._FUNCTIONS)
    for name, function in apply._FUNCTIONS.items():
        wanted = len(inspect.signature(function).parameters) - 2
        assert [len(s) for s in strengths[name]] == [wanted] * 5


@pytest.mark.parametrize("name", ALL)
def test_an_image_does_not_depend_on_its_batch(name):
    images = picture(150)  # more than are worked on at once
    whole = corrupt(images, name, 4, seed=3)
    assert whole.shape == images.shape
    assert whole.dtype == np.uint8
    assert (corrupt(images[141:143], name, 4, seed=3, start=141) == whole[141:143]).all()
    assert (images == picture(150)).all()


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides(name):
    images = picture(2)
    first, again, other = (corrupt(images, name, 5, seed=seed) for seed in (0, 0, 1))
    assert (first == again).all()
    drawn = name not in {
        "defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "saturate"
    }  # fmt: skip
    assert (first != other).any() == drawn


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("height", "width"), [(8, 8), (40, 24), (70, 130)])
def test_any_size_and_severity_works(name, height, width):
    images = picture(1, height, width)
    for severity in SEVERITIES:
        assert corrupt(images, name, severity).shape == images.shape


def test_the_set_of_constants_follows_the_size():
    small, large = picture(1, 64, 64), picture(1, 65, 65)
    for images, meant, other in ((small, "cifar", "imagenet"), (large, "imagenet", "cifar")):
        auto = corrupt(images, "contrast", 3)
        assert (auto == corrupt(images, "contrast", 3, constants=meant)).all()
        assert (auto != corrupt(images, "contrast", 3, constants=other)).any()


def test_an_empty_batch_stays_empty():
    assert corrupt(np.zeros((0, 32, 32, 3), np.uint8), "fog", 1).shape == (0, 32, 32, 3)


@pytest.mark.parametrize("level", [0, 77, 255])
@pytest.mark.parametrize("name", [*BLURS, "elastic_transform", "pixelate", "contrast"])
def test_an_even_image_cannot_be_blurred(name, level):
    even = np.full((1, 32, 32, 3), level, np.uint8)
    for severity in SEVERITIES:
        assert (corrupt(even, name, severity) == level).all()


def test_noise_has_the_published_size():
    grey = np.full((40, 32, 32, 3), 128, np.uint8)
    noise = corrupt(grey, "gaussian_noise", 5).astype(float) + 0.5 - 128  # half a level is cut off on average
    assert noise.std() == pytest.approx(0.10 * 255, rel=0.02)
    assert abs(noise.mean()) < 0.3
    shot = corrupt(grey, "shot_noise", 5) / 255
    assert shot.std() == pytest.approx((128 / 255 / 50) ** 0.5, rel=0.02)
    speckle = corrupt(grey, "speckle_noise", 5).astype(float)
    assert speckle.std() == pytest.approx(0.2 * 128, rel=0.02)
    impulses = corrupt(grey, "impulse_noise", 5)
    assert (impulses == 0).mean() == pytest.approx(0.035, abs=0.002)
    assert (impulses == 255).mean() == pytest.approx(0.035, abs=0.002)
    assert ((impulses == 128) | (impulses == 0) | (impulses == 255)).all()


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
    images = picture(1, 36, 30)
    kernel = blur.disc(*strength)
    assert kernel.sum() == pytest.approx(1)
    expected = [ndimage.correlate(images[0, ..., c].astype(float), kernel, mode="mirror") for c in range(3)]
    assert blur.defocus_blur(images, [], *strength)[0] == pytest.approx(np.stack(expected, -1), abs=1e-2)


def test_the_disc_has_its_radius():
    assert blur.disc(1.5, 0.1) == pytest.approx(np.full((3, 3), 1 / 9), abs=1e-6)
    assert blur.disc(10, 0.5).shape == (21, 21)
    assert blur.disc(3, 0.1).shape == (7, 7) or blur.disc(3, 0.1)[0].max() < 1e-12


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("factor", [1.0, 1.01, 1.13, 1.25, 1.75, 4.5])
def test_zoom_equals_scipys(size, factor):
    image = random_floats(size, size)
    crop = int(np.ceil(size / factor))
    start = (size - crop) // 2
    large = ndimage.zoom(image[start : start + crop, start : start + crop], factor, order=1)
    trim = (len(large) - size) // 2
    matrix = zoom_matrix(size, factor)
    assert separable(image, matrix, matrix) == pytest.approx(large[trim : trim + size, trim : trim + size], abs=1e-5)


@pytest.mark.parametrize(("sigma", "mode", "truncate"), [(0.4, "nearest", 4.0), (6, "nearest", 4.0), (40, "reflect", 3.0)])
def test_gaussian_matrix_equals_the_filter(sigma, mode, truncate):
    image = random_floats(20, 31)
    expected = ndimage.gaussian_filter(image.astype(float), sigma, mode=mode, truncate=truncate)
    matrices = [gaussian_matrix(size, sigma, mode, truncate) for size in image.shape]
    assert separable(image, *matrices) == pytest.approx(expected, abs=1e-5)


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


def test_frost_textures_differ_and_continue_over_the_border():
    textures = [frost_texture(number).astype(int) for number in range(5)]
    assert len({texture.tobytes() for texture in textures}) == 5
    for texture in textures:
        step = np.abs(np.diff(texture, axis=0)).mean()
        assert np.abs(texture[0] - texture[-1]).mean() < 2 * step
        assert 90 < texture.mean() < 170
        assert texture.std() > 45


@pytest.mark.parametrize("name", ALL)
def test_fixed_figures(name):
    """Mean and deviation of fixed pictures: a changed algorithm or constant shows here."""
    golden = json.loads(GOLDEN.read_text())[name]
    assert golden == pytest.approx(figures(name), abs=0.15)


def figures(name: str) -> list[float]:
    """Mean and deviation at severities 1 and 5, at 32 and at 96 pixels."""
    pictures = (picture(4), picture(1, 96, 96))
    results = [corrupt(images, name, severity).astype(float) for images in pictures for severity in (1, 5)]
    return [round(figure, 2) for result in results for figure in (result.mean(), result.std())]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"name": "gausian_noise"}, SettingError, "'gaussian_noise'"),
        ({"name": "fogg"}, SettingError, "'fog'"),
        ({"severity": 0}, SettingError, "1 to 5"),
        ({"severity": 6}, SettingError, "severity=6"),
        ({"severity": 2.5}, SettingError, "2.5"),
        ({"seed": -1}, SettingError, "seed=-1"),
        ({"start": 0.5}, SettingError, "start=0.5"),
        ({"constants": "imagnet"}, SettingError, "'imagenet'"),
        ({"images": np.zeros((1, 32, 32, 3))}, InputError, "float64"),
        ({"images": [[0]]}, InputError, "list"),
        ({"images": np.zeros((32, 32, 3), np.uint8)}, InputError, "[32, 32, 3]"),
        ({"images": np.zeros((1, 3, 32, 32), np.uint8)}, InputError, "[1, 3, 32, 32]"),
        ({"images": np.zeros((1, 4, 32, 3), np.uint8)}, InputError, "4 x 32"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, says):
    call = {"images": picture(), "name": "fog", "severity": 1} | arguments
    with pytest.raises(error) as caught:
        corrupt(**call)
    assert says in str(caught.value)


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize("name", sorted(set(ALL) - NOT_MONOTONE))
def test_distance_from_the_clean_image_grows_with_severity(name):
    images = np.load(SHARED / "cifar10_test.npz")["images"][:150]
    distances = [((corrupt(images, name, s) - images.astype(float)) ** 2).mean() for s in SEVERITIES]
    assert distances == sorted(distances)


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("gaussian_noise", 65, 88), ("pixelate", 50, 72), ("brightness", 8, 22), ("fog", 22, 45), ("frost", 30, 55)],
)
def test_a_real_network_errs_as_on_the_published_images(name, low, high):
    data = np.load(SHARED / "cifar10_test.npz")
    network = create("cifar_resnet20", weights=SHARED / "weights/cifar10_resnet20.safetensors").eval()
    images = corrupt(data["images"][:300], name, 5)
    with torch.inference_mode():
        logits = network(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255)
    error = 100 * (logits.argmax(1).numpy() != data["labels"][:300]).mean()
    assert low <= error <= high
