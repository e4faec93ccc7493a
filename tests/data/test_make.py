"""The made data sets: the same at every call, and something a network can learn."""

import pytest
import torch
from torch import nn

from data.make import make_pacs, shape_arrays
from dpl.data import batches, open_benchmark, square, to_float


def trained(images, labels, classes):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return net


def accuracy(net, images, labels):
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


def test_shapes_can_be_learned_and_domains_differ():
    (pixels, labels), (unseen, truth), (shifted, shifted_truth) = (
        shape_arrays(140, 7, domain=0, size=24, seed=0),
        shape_arrays(70, 7, domain=0, size=24, seed=1),
        shape_arrays(70, 7, domain=1, size=24, seed=1),
    )
    net = trained(to_float(pixels), torch.from_numpy(labels), 7)
    at_home = accuracy(net, to_float(unseen), torch.from_numpy(truth))
    abroad = accuracy(net, to_float(shifted), torch.from_numpy(shifted_truth))
    assert at_home > 0.9
    assert abroad < at_home - 0.1


@pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")
def test_the_same_seed_gives_the_same_images(tmp_path):
    read = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        images = open_benchmark("pacs", make_pacs(tmp_path / name, seed=seed))["cartoon"]
        read.append(next(batches(images, None, square(32), 64)).images)
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[0], read[2])
