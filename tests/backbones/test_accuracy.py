"""Real weights on real images: our re-written networks are the ones that were trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpl.backbones import create

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "weights").is_dir(), reason=f"no trained weights at {SHARED}"),
]
CASES = [
    # network, file, data, accuracy on the 7,000 test images of the file, images used here
    ("cifar_resnet20", "cifar10_resnet20", "cifar10_test", 91.6, 1000),
    ("cifar_resnet56", "cifar10_resnet56", "cifar10_test", 93.1, 500),
    ("wrn28_1", "cifar10_wrn28_1", "cifar10_test", 92.9, 500),
    ("cifar100_resnet32", "cifar100_resnet32", "cifar100_test", 71.9, 500),
]


def images_and_labels(data, count):
    with np.load(SHARED / f"{data}.npz") as file:
        images = torch.from_numpy(file["images"][:count]).permute(0, 3, 1, 2).float() / 255
        return images, torch.from_numpy(file["labels"][:count].astype(np.int64))


def accuracy(network, data, count):
    images, labels = images_and_labels(data, count)
    with torch.inference_mode():
        guesses = torch.cat([network(batch).argmax(1) for batch in images.split(250)])
    return 100 * (guesses == labels).float().mean().item()


def cropped(images):
    """Shift by up to four pixels into black, as these networks saw their images in training."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randint(0, 9, (2, len(images)), generator=generator).tolist()
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    return torch.stack([x[:, i : i + 32, j : j + 32] for x, i, j in zip(padded, rows, columns, strict=True)])


@pytest.mark.parametrize(("name", "weights", "data", "whole", "count"), CASES)
def test_clean_accuracy_is_near_the_listed_one(name, weights, data, whole, count):
    measured = accuracy(create(name, weights=SHARED / "weights" / f"{weights}.safetensors"), data, count)
    error = 100 * np.sqrt(whole / 100 * (1 - whole / 100) / count)
    assert abs(measured - whole) < 3 * error


@pytest.mark.parametrize(("name", "weights", "data", "whole", "count"), CASES)
def test_the_first_running_statistics_agree_with_the_normalisation(name, weights, data, whole, count):
    """Accuracy hardly tells similar normalisations apart; the variance that the first BN remembers does."""
    network = create(name, weights=SHARED / "weights" / f"{weights}.safetensors")
    norm = network.get_submodule("network.layer1.layer.0.bn1" if name == "wrn28_1" else "network.bn1")
    seen = []
    handle = norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        network(cropped(images_and_labels(data, 500)[0]))
    handle.remove()
    alive = norm.running_var > 1e-3
    ratio = (seen[0].var(dim=(0, 2, 3)) / norm.running_var)[alive].median().item()
    assert 0.93 < ratio < 1.07


def test_a_wrong_normalisation_costs_accuracy():
    path = SHARED / "weights" / "cifar10_wrn28_1.safetensors"
    assert accuracy(create("wrn28_1", weights=path, normalise="none"), "cifar10_test", 250) < 70
