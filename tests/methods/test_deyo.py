import math

import pytest
import torch
from torch import Tensor

import dpl
from dpl.core.errors import InputError
from dpl.methods.deyo import shuffle_patches
from parity.tiny import stream, tiny_network


def upside_down(images: Tensor) -> Tensor:
    return images.flip(2)


def test_loss_equals_a_slow_loop() -> None:
    adaptive = dpl.adapt(tiny_network(), "deyo", augment=upside_down)
    norm = dpl.adapt(tiny_network(), "norm")
    images = stream()[0]
    p = norm(images).softmax(dim=1)
    entropies = [-sum(q * math.log(q) for q in row) for row in p.tolist()]
    candidates = [i for i, h in enumerate(entropies) if h < 0.5 * math.log(10)]
    destroyed = norm(upside_down(images[candidates])).softmax(dim=1)  # statistics of the candidates alone
    losses = []
    for row, i in enumerate(candidates):
        label = int(p[i].argmax())
        drop = float(p[i, label] - destroyed[row, label])
        if drop > 0.2:
            losses.append((math.exp(0.4 * math.log(10) - entropies[i]) + math.exp(drop)) * entropies[i])
    adaptive(images)
    assert 0 < len(losses) < len(candidates) < 32
    assert adaptive.last.loss == pytest.approx(sum(losses) / len(losses), rel=1e-10)
    assert adaptive.last.selected * 32 == pytest.approx(len(losses))


def test_nothing_changes_when_no_prediction_needs_its_shape() -> None:
    adaptive = dpl.adapt(tiny_network(), "deyo", augment=torch.clone)
    before = {name: value.detach().clone() for name, value in adaptive.method.trainable.items()}
    adaptive(stream()[0])
    assert adaptive.last.reliable > 0
    assert not adaptive.last.updated
    assert all(torch.equal(value, before[name]) for name, value in adaptive.method.trainable.items())


def test_the_top_does_not_train() -> None:
    assert not any("layer4" in name for name in dpl.adapt(tiny_network(), "deyo").trainable)


def test_shuffling_keeps_the_patches_and_gives_each_image_its_own_order() -> None:
    images = torch.arange(2.0 * 3 * 8 * 12).reshape(2, 3, 8, 12)
    images[1] = images[0]
    shuffled = shuffle_patches(images, 4, torch.Generator().manual_seed(0))

    def cut(image: Tensor) -> list[list[float]]:
        return [image[:, 2 * r : 2 * r + 2, 3 * c : 3 * c + 3].flatten().tolist() for r in range(4) for c in range(4)]

    for before, after in zip(images, shuffled, strict=True):
        assert sorted(cut(before)) == sorted(cut(after))
    assert not torch.equal(shuffled[0], shuffled[1])
    assert not torch.equal(shuffled[0], images[0])


@pytest.mark.parametrize("size", [(17, 15), (3, 5), (1, 1)])
def test_sizes_that_patches_do_not_divide_are_kept(size: tuple[int, int]) -> None:
    shuffled = shuffle_patches(torch.rand(2, 3, *size), 4)
    assert shuffled.shape == (2, 3, *size)
    assert shuffled.isfinite().all()


def test_data_without_patches_need_an_augmentation() -> None:
    with pytest.raises(InputError, match="augment="):
        shuffle_patches(torch.rand(2, 8), 4)
