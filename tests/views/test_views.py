"""Views against torchvision's definitions, and their draws."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpl.core.errors import InputError, MissingExtraError
from dpl.core.extras import optional
from dpl.views import (
    View,
    adacontrast_strong_view,
    adacontrast_weak_view,
    cotta_view,
    memo_view,
    rmt_view,
    roid_view,
    seeded,
)
from dpl.views.colour import brightness, colour_jitter, contrast, gamma, hue, saturation
from dpl.views.draw import Draw
from dpl.views.geometry import blur, centred, crop, random_resized_crop, sample, turned, wander, zoomed_crop

VIEWS: list[Callable[..., View]] = [
    cotta_view,
    rmt_view,
    roid_view,
    adacontrast_weak_view,
    adacontrast_strong_view,
    memo_view,
]
SIZES = [(5, 3, 32, 32), (2, 3, 96, 112), (3, 1, 17, 23), (1, 3, 8, 8), (2, 4, 1, 1)]

try:
    tv = optional("torchvision.transforms.functional", "bench")
except MissingExtraError:
    tv = None
with_torchvision = pytest.mark.skipif(tv is None, reason="torchvision is not installed")


def images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape or (4, 3, 20, 24), generator=torch.Generator().manual_seed(0), dtype=dtype)


def factors(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("per_sample", [True, False])
def test_any_size_comes_back_finite_in_range_and_repeatable(
    make: Callable[..., View], size: tuple[int, ...], per_sample: bool
) -> None:
    x, view = images(*size, dtype=torch.float32), make(per_sample=per_sample)
    kept = x.clone()
    y = seeded(view, 3)(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.isfinite().all()
    assert 0 <= y.min() <= y.max() <= 1
    assert torch.equal(seeded(view, 3)(x), y)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_a_seeded_view_leaves_the_global_generator_alone(make: Callable[..., View]) -> None:
    before = torch.get_rng_state()
    seeded(make(), 1)(images())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [cotta_view, roid_view, adacontrast_strong_view], ids=lambda make: make.__name__)
def test_other_seeds_give_other_views(make: Callable[..., View]) -> None:
    x = images()
    assert (seeded(make(), 1)(x) - seeded(make(), 2)(x)).abs().mean() > 1e-3


@pytest.mark.parametrize("make", [roid_view, adacontrast_strong_view], ids=lambda make: make.__name__)
def test_factors_are_per_image_or_for_the_batch(make: Callable[..., View]) -> None:
    """Of noiseless views of one image repeated, all are equal exactly when the factors are shared."""
    same = images(1, 3, 32, 32).expand(6, -1, -1, -1)
    shared = seeded(make(per_sample=False), 5)(same)
    own = seeded(make(per_sample=True), 5)(same)
    assert torch.equal(shared, shared[:1].expand_as(shared))
    assert all((own[i] - own[j]).abs().max() > 1e-3 for i in range(6) for j in range(i))


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_half_precision_keeps_its_type(make: Callable[..., View]) -> None:
    x = images(dtype=torch.float32).bfloat16()
    y = seeded(make(), 0)(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - seeded(make(), 0)(x.float())).abs().max() < 1e-2


def test_what_is_no_image_in_0_1_is_refused() -> None:
    with pytest.raises(InputError, match="normalise inside"):
        cotta_view()(images() * 4 - 2)
    with pytest.raises(InputError, match="0 to 255"):
        cotta_view()(torch.tensor([0.0, 255.0]).view(2, 1, 1, 1).expand(2, 3, 8, 8))
    with pytest.raises(InputError, match=r"\(4, 10\)"):
        cotta_view()(torch.rand(4, 10))
    assert cotta_view()(images() * 1.4 - 0.2).max() <= 1  # a little overshoot is clipped


@with_torchvision
def test_colours_are_torchvisions() -> None:
    x, values = images(), [0.3, 0.9, 1.0, 1.7]
    for ours, theirs in (
        (brightness, tv.adjust_brightness),
        (contrast, tv.adjust_contrast),
        (saturation, tv.adjust_saturation),
        (gamma, tv.adjust_gamma),
    ):
        expected = torch.stack([theirs(image, value) for image, value in zip(x, values, strict=True)])
        assert (ours(x, factors(*values)) - expected).abs().max() < 1e-9
    turns = [-0.5, -0.06, 0.0, 0.3]
    x[0, :, :5] = 0.4  # grey has no hue
    x[1, 1] = x[1, 0]  # ties for the brightest channel
    expected = torch.stack([tv.adjust_hue(image, turn) for image, turn in zip(x, turns, strict=True)])
    assert (hue(x, factors(*turns)) - expected).abs().max() < 1e-5  # torchvision's hue is in float32


def test_grey_images_keep_hue_and_saturation() -> None:
    x = images(2, 1, 8, 8)
    assert torch.equal(hue(x, factors(0.1, 0.2)), x)
    assert torch.equal(saturation(x, factors(0.1, 0.2)), x)
    assert contrast(x, factors(0.0, 0.0)).std(dim=(1, 2, 3)).max() < 1e-12


def test_colour_changes_come_in_every_order() -> None:
    x, change = images(1, 3, 4, 4), {"brightness": factors(1.4), "contrast": factors(0.5), "gamma": factors(2.0)}
    torch.manual_seed(0)
    results = {round(float(colour_jitter(x, change).sum()), 9) for _ in range(60)}
    assert len(results) == math.factorial(3)


@with_torchvision
@pytest.mark.parametrize(("outside", "padding"), [("border", "edge"), ("reflection", "reflect")])
@pytest.mark.parametrize("size", [(32, 32), (21, 30)])
def test_a_warp_equals_padding_warping_and_cropping(outside: str, padding: str, size: tuple[int, int]) -> None:
    x = images(4, 3, *size)
    angles, scales, right, down = [-15, 15, 7.3, 0], [0.9, 1.1, 1, 0.95], [-4, 4, 2, 0], [3, -2, 0, 1]
    radians = torch.deg2rad(factors(*angles))
    ours = sample(x, turned(x, radians, factors(*scales), factors(*right), factors(*down), margin=2), outside)  # type: ignore[arg-type]
    height, width = size
    padded = tv.pad(x, [width // 2, height // 2], padding_mode=padding)
    warped = [
        tv.affine(padded[i], angles[i], [right[i], down[i]], scales[i], [0.0, 0.0], tv.InterpolationMode.BILINEAR)
        for i in range(4)
    ]
    expected = tv.center_crop(torch.stack(warped), [height + 4, width + 4])
    assert (ours - expected).abs().max() < 1e-5  # torchvision's matrix is in float32


@with_torchvision
def test_blur_is_torchvisions_inside_a_margin() -> None:
    x, sigmas = images(), [0.001, 0.2, 0.5, 2.0]
    expected = torch.stack([tv.gaussian_blur(image, [5, 5], [s, s]) for image, s in zip(x, sigmas, strict=True)])
    assert (blur(x, factors(*sigmas), 2) - expected[..., 2:-2, 2:-2]).abs().max() < 1e-9
    assert torch.equal(blur(x[:1], factors(0.001), 2), x[:1, :, 2:-2, 2:-2])


@with_torchvision
def test_a_crop_is_torchvisions_resized_crop() -> None:
    x = images()
    left, top, wide, high = [0, 3, 10, 0], [0, 5, 2, 0], [24, 12, 14, 1], [20, 9, 18, 1]
    expected = torch.stack(
        [tv.resized_crop(x[i], top[i], left[i], high[i], wide[i], [20, 24], antialias=False) for i in range(4)]
    )
    ours = sample(x, crop(x, factors(*left), factors(*top), factors(*wide), factors(*high)))
    assert (ours - expected).abs().max() < 1e-9


def test_a_zoomed_crop_is_a_part_of_the_enlarged_image() -> None:
    x = images(1, 3, 28, 14)
    enlarged = torch.nn.functional.interpolate(x, size=(32, 16), mode="bilinear", align_corners=False)
    parts = [enlarged[..., i : i + 28, j : j + 14] for i in range(5) for j in range(3)]
    torch.manual_seed(0)
    seen = set()
    for _ in range(200):
        ours = sample(x, zoomed_crop(x, Draw(x, per_sample=True), 8 / 7))
        distances = [float((ours - part).abs().max()) for part in parts]
        assert min(distances) < 1e-9
        seen.add(distances.index(min(distances)))
    assert len(seen) == 15


def test_resized_crops_keep_to_area_and_aspect() -> None:
    x = torch.zeros(4000, 1, 60, 60, dtype=torch.float64)
    torch.manual_seed(0)
    places = random_resized_crop(x, Draw(x, per_sample=True), 0.2)
    step_x, step_y = (places.x[:, 0, 31] - places.x[:, 0, 30]), (places.y[:, 31, 0] - places.y[:, 30, 0])
    area, aspect = step_x * step_y, step_x / step_y
    assert 0.18 < area.min() < 0.22
    assert area.max() <= 1
    assert 0.72 < aspect.min() < 0.78
    assert 1.29 < aspect.max() < 1.39
    assert places.x.min() >= 0
    assert places.x.max() <= 59


def test_wandering_keeps_to_its_limits() -> None:
    x = torch.zeros(4000, 1, 32, 32, dtype=torch.float64)
    torch.manual_seed(0)
    places = wander(x, Draw(x, per_sample=True), degrees=15, shift=1 / 8, scale=(0.9, 1.1), margin=0)
    across = torch.stack([places.x[:, 0, 1] - places.x[:, 0, 0], places.y[:, 0, 1] - places.y[:, 0, 0]])
    zoom, angle = 1 / across.norm(dim=0), torch.rad2deg(torch.atan2(across[1], across[0]))
    assert 0.9 <= zoom.min() < 0.905
    assert 1.095 < zoom.max() <= 1.1
    assert -15 - 1e-9 <= angle.min() < -14.8
    assert 14.8 < angle.max() <= 15 + 1e-9


def test_half_of_the_images_are_flipped() -> None:
    x = images(1, 1, 8, 8).expand(2000, -1, -1, -1)
    y = seeded(adacontrast_weak_view(), 0)(x)
    flipped = (y - x.flip(-1)).abs().amax(dim=(1, 2, 3)) < 1e-9
    kept = (y - x).abs().amax(dim=(1, 2, 3)) < 1e-9
    assert (flipped | kept).all()
    assert 0.45 < flipped.double().mean() < 0.55


def test_a_fifth_of_the_strong_views_is_grey() -> None:
    x = images(1, 3, 8, 8).expand(2000, -1, -1, -1)
    y = seeded(adacontrast_strong_view(), 0)(x)
    grey = (y.amax(dim=1) - y.amin(dim=1)).amax(dim=(1, 2)) < 1e-9
    assert 0.17 < grey.double().mean() < 0.23


@pytest.mark.parametrize(
    "make", [adacontrast_weak_view, adacontrast_strong_view, memo_view], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(("side", "cropped"), [(32, False), (95, False), (96, True)])
def test_large_images_are_cropped(make: Callable[..., View], side: int, cropped: bool) -> None:
    x = images(2, 3, side, side)
    assert torch.equal(seeded(make(), 0)(x), seeded(make(crop=cropped), 0)(x))
    assert not torch.equal(seeded(make(), 0)(x), seeded(make(crop=not cropped), 0)(x))


def test_places_without_a_change_give_the_image_back() -> None:
    x = images()
    assert (sample(x, centred(x)) - x).abs().max() < 1e-12
