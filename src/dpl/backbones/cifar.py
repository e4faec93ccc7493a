"""Networks for 32-pixel images: CIFAR ResNets (He et al., 2016), Wide ResNet, ResNeXt-29, and a tiny one.

Each is a sequence of named layers. Layers without parameters do not appear in a state dict, so its names are those of
published checkpoints.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "CifarResNet", "DebugCNN", "MeanPool", "ResNeXt29", "ResidualBlock", "WideResNet", "WideStemResNet", "conv1x1",
    "conv3x3",
]  # fmt: skip

_Block = Callable[..., nn.Module]  # from input channels, output channels and stride


conv3x3 = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)  # the image size divided by the stride
conv1x1 = partial(nn.Conv2d, kernel_size=1, bias=False)


class MeanPool(nn.Module):
    """The mean over all pixels: maps [B, d, H, W] to features [B, d]."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return the features."""
        return maps.mean(dim=(2, 3))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; `relu` says whether a ReLU follows the addition."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: _Block, relu: bool = True) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = shortcut(inputs, outputs, stride=stride)
        self._relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the maps of the next layer."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        total: Tensor = residual + self.shortcut(x)
        return F.relu(total) if self._relu else total


class _PaddedShortcut(nn.Module):
    """He et al.'s option A: every `stride`-th pixel between channels of zeros; no parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride, self._padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self._stride, :: self._stride]
        return F.pad(x, (0, 0, 0, 0, self._padding, self._padding)) if self._padding else x


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a shortcut with BN where the width changes, and nothing elsewhere."""
    if inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(conv1x1(inputs, outputs, stride=stride), nn.BatchNorm2d(outputs))


class _WideBlock(nn.Module):
    """BN-ReLU-conv twice; where the width changes, the shortcut too starts from the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, outputs, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.convShortcut = conv1x1(inputs, outputs, stride=stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(active)
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + shortcut


class _Bottleneck(nn.Module):
    """A ResNeXt bottleneck of the kind 4 x 32d: a 3x3 convolution in four groups between two 1x1 ones."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 2
        self.conv_reduce = conv1x1(inputs, width)
        self.bn_reduce = nn.BatchNorm2d(width)
        self.conv_conv = conv3x3(width, width, stride=stride, groups=4)
        self.bn = nn.BatchNorm2d(width)
        self.conv_expand = conv1x1(width, outputs)
        self.bn_expand = nn.BatchNorm2d(outputs)
        self.downsample = _projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        x = F.relu(self.bn_reduce(self.conv_reduce(x)))
        x = F.relu(self.bn(self.conv_conv(x)))
        return F.relu(self.bn_expand(self.conv_expand(x)) + shortcut)


class _StagedNetwork(nn.Sequential):
    """Named layers in their order: a stem, three stages and a linear classifier."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(OrderedDict(layers))
        for module in self.modules():  # as He et al. draw weights for ReLU; other layers keep PyTorch's defaults
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _stages(name: str, block: _Block, blocks: int, channels: Sequence[int]) -> dict[str, nn.Module]:
    """Return three numbered stages of so many blocks; the second and the third halve the image."""
    stages: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(channels), 1):
        first = block(inputs, outputs, 1 if number == 1 else 2)
        stages[f"{name}{number}"] = nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(1, blocks)))
    return stages


class DebugCNN(nn.Sequential):
    """Three convolution stages of 8, 16 and 32 channels with BatchNorm; 32 features. For tests and dry runs."""

    def __init__(self, num_classes: int) -> None:
        layers: dict[str, nn.Module] = {
            f"layer{i}": nn.Sequential(conv3x3(inputs, outputs, stride=stride), nn.BatchNorm2d(outputs), nn.ReLU())
            for i, (inputs, outputs, stride) in enumerate(((3, 8, 1), (8, 16, 2), (16, 32, 2)), 1)
        }
        super().__init__(OrderedDict(layers, pool=MeanPool(), fc=nn.Linear(32, num_classes)))


class CifarResNet(_StagedNetwork):
    """ResNet of 6 `blocks` + 2 layers: a 3x3 stem of 16 channels, three stages of so many blocks, 64 features."""

    def __init__(self, blocks: int, num_classes: int) -> None:
        stem = {"conv1": conv3x3(3, 16), "bn1": nn.BatchNorm2d(16), "relu": nn.ReLU()}
        stages = _stages("layer", partial(ResidualBlock, shortcut=_PaddedShortcut), blocks, (16, 16, 32, 64))
        super().__init__(**stem, **stages, pool=MeanPool(), linear=nn.Linear(64, num_classes))


class WideStemResNet(_StagedNetwork):
    """A 32-layer CIFAR ResNet with a stem of 64 channels; ReLU after each stage only; 256 features of 32 pixels."""

    def __init__(self, num_classes: int) -> None:
        layers: dict[str, nn.Module] = {"conv1": conv3x3(3, 64), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
        block = partial(ResidualBlock, shortcut=_projection, relu=False)
        for name, stage in _stages("layer", block, 5, (64, 16, 32, 64)).items():
            layers |= {name: stage, name.replace("layer", "relu"): nn.ReLU()}
        super().__init__(**layers, pool=nn.AvgPool2d(4), flat=nn.Flatten(), linear=nn.Linear(64 * 4, num_classes))


class WideResNet(_StagedNetwork):
    """Pre-activation WRN-28-`width` (Zagoruyko and Komodakis, 2016).

    It has three stages of four blocks with 16, 32 and 64 times `width` channels. Parameter names are those of published
    checkpoints: `block1..3.layer.N` and `fc` (RobustBench); `stage` and `head` name others.
    """

    def __init__(self, width: int, num_classes: int, *, stage: str = "block", head: str = "fc") -> None:
        layers: dict[str, nn.Module] = {"conv1": conv3x3(3, 16)}
        for name, stages in _stages(stage, _WideBlock, 4, (16, 16 * width, 32 * width, 64 * width)).items():
            layers[name] = nn.Sequential(OrderedDict(layer=stages))
        layers |= {"bn1": nn.BatchNorm2d(64 * width), "relu": nn.ReLU(), "pool": MeanPool()}
        super().__init__(**layers, **{head: nn.Linear(64 * width, num_classes)})


class ResNeXt29(_StagedNetwork):
    """ResNeXt-29 (Xie et al., 2017), 4 x 32d: three stages of three bottlenecks, 1,024 features; AugMix's names."""

    def __init__(self, num_classes: int) -> None:
        stem = {"conv_1_3x3": conv3x3(3, 64), "bn_1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
        stages = _stages("stage_", _Bottleneck, 3, (64, 256, 512, 1024))
        super().__init__(**stem, **stages, pool=MeanPool(), classifier=nn.Linear(1024, num_classes))
