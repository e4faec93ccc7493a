"""Transforms: equal to torchvision's on Pillow images, to the bit, and seeded where they draw."""

import numpy as np
import pytest
import torch
from PIL import Image

from dpl.core.errors import DataError, MissingExtraError, SettingError
from dpl.core.extras import optional
from dpl.data.transforms import Augmentation, Evaluation, resize_crop, square, to_float, training, unchanged

SIZES = [(37, 53), (53, 37), (300, 200), (64, 64), (201, 333)]


@pytest.fixture(scope="module")
def vision():
    try:
        return optional("torchvision.transforms", "bench")
    except MissingExtraError:
        pytest.skip("compares with torchvision, which is not installed")


def noise(size, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_equals_torchvision(vision, size):
    image, tensor = noise(size), vision.ToTensor()
    pairs = [
        (square(24), [vision.Resize((24, 24))]),
        (square(32, crop=27), [vision.Resize((32, 32)), vision.CenterCrop(27)]),
        (square(32, crop=29), [vision.Resize((32, 32)), vision.CenterCrop(29)]),  # half a pixel left over: to even
        (resize_crop(32, 28), [vision.Resize(32), vision.CenterCrop(28)]),
        (unchanged(), []),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours(image), tensor(vision.Compose(theirs)(image))), ours


def test_floats_lie_between_0_and_1_and_are_contiguous():
    pixels = np.array([0, 127, 255], np.uint8).reshape(1, 1, 1, 3).repeat(2, axis=0)
    floats = to_float(pixels)
    assert floats.shape == (2, 3, 1, 1)
    assert floats.dtype == torch.float32
    assert floats.is_contiguous()
    assert floats[0].flatten().tolist() == pytest.approx([0, 127 / 255, 1])


def test_a_long_strip_cannot_fill_the_memory():
    with pytest.raises(DataError, match="too narrow to be resized"):
        resize_crop(256, 224).pixels(Image.new("RGB", (1, 20_000_000)))


def test_an_image_smaller_than_the_crop():
    with pytest.raises(DataError, match="20 x 30 pixels: smaller than the crop of 24"):
        Evaluation(crop=24).pixels(Image.new("RGB", (20, 30)))


@pytest.mark.parametrize("make", [lambda: square(0), lambda: resize_crop(-1, 3), lambda: training(0)])
def test_sizes_below_one_are_refused(make):
    with pytest.raises(SettingError, match="expected a positive number of pixels"):
        make()


def test_a_crop_larger_than_the_resized_image_is_refused():
    with pytest.raises(SettingError, match="crop=225 does not fit into resize=224"):
        resize_crop(224, 225)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_augmentation_applies_torchvisions_operations(vision, size, seed):
    """The same draws, carried out by torchvision's functions, give the same pixels."""
    functional = optional("torchvision.transforms.functional", "bench")
    transform, image = training(48), noise(size)
    found = transform.pixels(image, np.random.default_rng(seed))

    draw = np.random.default_rng(seed)
    left, top, right, bottom = transform._box(image.size, draw)
    image = functional.resized_crop(image, top, left, bottom - top, right - left, [48, 48])
    image = functional.hflip(image) if draw.random() < 0.5 else image
    amounts = [*draw.uniform(0.7, 1.3, size=3), draw.uniform(-0.3, 0.3)]
    steps = ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue"]
    for step in draw.permutation(4):
        image = getattr(functional, steps[step])(image, float(amounts[step]))
    image = functional.to_grayscale(image, 3) if draw.random() < 0.1 else image
    np.testing.assert_array_equal(found, np.asarray(image))


@pytest.mark.parametrize("size", [(200, 150), (160, 160), (500, 50), (50, 500)])
def test_random_crops_are_distributed_as_torchvisions(vision, size):
    draw, transform, image = np.random.default_rng(0), training(32), Image.new("RGB", size)
    torch.manual_seed(0)
    ours = np.array([transform._box(size, draw) for _ in range(1500)])
    theirs = np.array([vision.RandomResizedCrop.get_params(image, [0.7, 1.0], [3 / 4, 4 / 3]) for _ in range(1500)])
    our_shape, their_shape = ours[:, [3, 2]] - ours[:, [1, 0]], theirs[:, 2:]
    np.testing.assert_allclose(our_shape.mean(0), their_shape.mean(0), rtol=0.02)
    np.testing.assert_allclose(our_shape.std(0), their_shape.std(0), rtol=0.1)
    np.testing.assert_allclose(ours[:, [1, 0]].mean(0), theirs[:, :2].mean(0), rtol=0.1, atol=0.5)
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 2:] <= size).all()


def test_augmentation_follows_its_generator_and_nothing_else():
    image, transform = noise((60, 40)), training(32)
    torch.manual_seed(1)
    first = transform(image, np.random.default_rng(3))
    torch.manual_seed(2)
    assert torch.equal(first, transform(image, np.random.default_rng(3)))
    assert not torch.equal(first, transform(image, np.random.default_rng(4)))
    assert first.shape == (3, 32, 32)


def test_without_chance_the_augmentation_is_a_resize():
    still = Augmentation(32, scale=(1.0, 1.0), ratio=(1.0, 1.0), jitter=0.0, hue=0.0, grey=0.0)
    image = noise((64, 64))
    versions = {still.pixels(image, np.random.default_rng(seed)).tobytes() for seed in range(8)}
    flat = image.resize((32, 32), Image.Resampling.BILINEAR)
    hue_rounded = np.asarray(flat.convert("HSV").convert("RGB"))
    assert versions == {hue_rounded.tobytes(), hue_rounded[:, ::-1].tobytes()}
