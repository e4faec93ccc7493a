"""Networks for 32-pixel images: CIFAR ResNets (He et al., 2016), Wide ResNet and ResNeXt-29."""

import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.errors import SettingError

__all__ = ["CifarResNet", "ResNeXt29", "WideResNet", "WideStemResNet", "conv3x3"]

_EXPANSION = 4  # of a ResNeXt bottleneck


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution that keeps the image size (divided by `stride`), without bias."""
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, groups=groups, bias=False)


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1x1 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)


def _initialise(network: nn.Module) -> None:
    """Draw convolution weights as He et al. do for ReLU networks; other layers keep PyTorch's defaults."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (He et al.'s option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self._stride, self._padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self._stride > 1:
            x = x[:, :, :: self._stride, :: self._stride]
        return F.pad(x, (0, 0, 0, 0, self._padding, self._padding)) if self._padding else x


class CifarResNet(nn.Module):
    """ResNet-`depth`: a 3x3 stem of 16 channels and three stages of (depth - 2) / 6 blocks."""

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 2, 6)
        if remainder or blocks < 1:
            raise SettingError(f"depth={depth}: expected the depth of a CIFAR ResNet, 8, 14, 20, 26, 32 ... (6 n + 2).")
        self.conv1 = conv3x3(3, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[_Block(16, 16, 1) for _ in range(blocks)])
        self.layer2 = nn.Sequential(_Block(16, 32, 2), *[_Block(32, 32, 1) for _ in range(blocks - 1)])
        self.layer3 = nn.Sequential(_Block(32, 64, 2), *[_Block(64, 64, 1) for _ in range(blocks - 1)])
        self.linear = nn.Linear(64, num_classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, H, W]."""
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))  # features [B, 64]
        return logits


class _ProjectionBlock(nn.Module):
    """Two 3x3 convolutions and a projected shortcut where the width changes; no ReLU after the addition."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs
        self.shortcut = nn.Sequential(*([] if same else [_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs)]))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        total: Tensor = residual + self.shortcut(x)
        return total


class WideStemResNet(nn.Module):
    """A 32-layer CIFAR ResNet with a stem of 64 channels; ReLU after each stage only; 256 features of 32 pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(3, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _projection_stage(64, 16, 1)
        self.layer2 = _projection_stage(16, 32, 2)
        self.layer3 = _projection_stage(32, 64, 2)
        self.linear = nn.Linear(64 * 4, num_classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, 32, 32]."""
        x = F.relu(self.bn1(self.conv1(images)))
        for stage in (self.layer1, self.layer2, self.layer3):
            x = F.relu(stage(x))
        logits: Tensor = self.linear(F.avg_pool2d(x, 4).flatten(1))  # features [B, 64 * 2 * 2]
        return logits


def _projection_stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    rest = [_ProjectionBlock(outputs, outputs, 1) for _ in range(4)]
    return nn.Sequential(_ProjectionBlock(inputs, outputs, stride), *rest)


class _WideBlock(nn.Module):
    """BN-ReLU-conv twice; where the width changes, the shortcut too starts from the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.convShortcut = _conv1x1(inputs, outputs, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(active)
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + shortcut


class _WideStage(nn.Module):
    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        rest = [_WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        self.layer = nn.Sequential(_WideBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


class WideResNet(nn.Module):
    """Pre-activation WRN-`depth`-`width` (Zagoruyko and Komodakis, 2016).

    It has three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times `width` channels. Parameter names are those
    of published checkpoints: `block1..3.layer.N` and `fc` (RobustBench); `stage` and `head` name others.
    """

    def __init__(self, depth: int, width: int, num_classes: int, *, stage: str = "block", head: str = "fc") -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 4, 6)
        if remainder or blocks < 1:
            raise SettingError(f"depth={depth}: expected the depth of a Wide ResNet, 10, 16, 22, 28 ... (6 n + 4).")
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = conv3x3(3, channels[0])
        self._stages = [f"{stage}{i}" for i in (1, 2, 3)]
        for i, name in enumerate(self._stages):
            self.add_module(name, _WideStage(blocks, channels[i], channels[i + 1], 1 if i == 0 else 2))
        self.bn1 = nn.BatchNorm2d(channels[3])
        self._head = head
        self.add_module(head, nn.Linear(channels[3], num_classes))
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, H, W]."""
        x = self.conv1(images)
        for name in self._stages:
            x = self.get_submodule(name)(x)
        features = F.relu(self.bn1(x)).mean(dim=(2, 3))  # [B, 64 width]
        logits: Tensor = self.get_submodule(self._head)(features)
        return logits


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, planes: int, stride: int, groups: int, group_width: int) -> None:
        super().__init__()
        width, outputs = groups * planes * group_width // 64, planes * _EXPANSION
        self.conv_reduce = _conv1x1(inputs, width)
        self.bn_reduce = nn.BatchNorm2d(width)
        self.conv_conv = conv3x3(width, width, stride, groups)
        self.bn = nn.BatchNorm2d(width)
        self.conv_expand = _conv1x1(width, outputs)
        self.bn_expand = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        projection = None if same else nn.Sequential(_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))
        self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn_reduce(self.conv_reduce(x)))
        x = F.relu(self.bn(self.conv_conv(x)))
        return F.relu(self.bn_expand(self.conv_expand(x)) + shortcut)


class ResNeXt29(nn.Module):
    """ResNeXt-29 (Xie et al., 2017): three stages of three bottlenecks, 64 to 1,024 channels.

    Parameter names are those of AugMix and RobustBench; `groups` x `group_width` is 4 x 32 in AugMix.
    """

    def __init__(self, num_classes: int, *, groups: int = 4, group_width: int = 32) -> None:
        super().__init__()
        self.conv_1_3x3 = conv3x3(3, 64)
        self.bn_1 = nn.BatchNorm2d(64)
        self.stage_1 = _bottleneck_stage(64, 64, 1, groups, group_width)
        self.stage_2 = _bottleneck_stage(256, 128, 2, groups, group_width)
        self.stage_3 = _bottleneck_stage(512, 256, 2, groups, group_width)
        self.classifier = nn.Linear(256 * _EXPANSION, num_classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, H, W]."""
        x = F.relu(self.bn_1(self.conv_1_3x3(images)))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        logits: Tensor = self.classifier(x.mean(dim=(2, 3)))  # features [B, 1024]
        return logits


def _bottleneck_stage(inputs: int, planes: int, stride: int, groups: int, group_width: int) -> nn.Sequential:
    first = _Bottleneck(inputs, planes, stride, groups, group_width)
    rest = [_Bottleneck(planes * _EXPANSION, planes, 1, groups, group_width) for _ in range(2)]
    return nn.Sequential(first, *rest)
