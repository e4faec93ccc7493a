"""The few building blocks that our own networks share."""

from torch import nn

__all__ = ["conv1x1", "conv3x3", "initialise"]


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution that keeps the image size (divided by `stride`); BN brings the bias."""
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, groups=groups, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1x1 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)


def initialise(network: nn.Module) -> None:
    """Draw convolution weights as He et al. do for ReLU networks; the other layers keep PyTorch's start."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
