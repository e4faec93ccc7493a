"""The corruptions as a whole: batches, seeds, sizes, wrong arguments, fixed figures, and a real network."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dpl.backbones import create
from dpl.core.errors import InputError, SettingError
from dpl.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES, apply, corrupt
from dpl.data.corruptions.constants import CIFAR, IMAGENET

ALL = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur")
FIXED = {
    "defocus_blur",
    "zoom_blur",
    "gaussian_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "saturate",
}
# Where the published strengths do not grow from one severity to the next, or one shrinks while another grows.
NOT_MONOTONE = {"glass_blur", "motion_blur", "frost", "elastic_transform", "spatter", "saturate"}
GOLDEN = Path(__file__).with_name("corruptions_golden.json")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not (SHARED / "weights").is_dir(), reason=f"no images and weights at {SHARED}")


def picture(count: int = 1, height: int = 32, width: int = 32) -> np.ndarray:
    """Coloured waves with a black and a white block: smooth parts, edges, and both ends of the range."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(2 * np.pi * (f * x + g * y) + p) for f, g, p in ((1, 2, 0), (3, 1, 1), (2, 2, 2))]
    image = (127 + 90 * np.stack(waves, axis=-1)).astype(np.uint8)
    image[: height // 4, : width // 4], image[-height // 4 :, -width // 4 :] = 0, 255
    return np.stack([np.roll(image, 3 * n, axis=1) for n in range(count)])


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
    assert (first != other).any() == (name not in FIXED)


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


@pytest.mark.parametrize("name", ALL)
def test_fixed_figures(name):
    """Mean and deviation of fixed pictures: a changed algorithm or constant shows here."""
    golden = json.loads(GOLDEN.read_text())[name]
    assert golden == pytest.approx(figures(name), abs=0.15)


def figures(name: str) -> list[float]:
    """Mean and deviation at all severities, at 32 and at 96 pixels."""
    pictures = (picture(4), picture(1, 96, 96))
    results = [corrupt(images, name, severity).astype(float) for images in pictures for severity in SEVERITIES]
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
