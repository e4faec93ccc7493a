"""Small residual networks for 32-pixel images: the ResNet-20 ... 110 of He et al. (2016) and a wide-stem kin."""

import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones.layers import conv1x1, conv3x3, initialise
from dpl.core.errors import SettingError

__all__ = ["CifarResNet", "WideStemResNet"]


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
            raise SettingError(f"depth={depth} is no CIFAR ResNet; expected 8, 14, 20, 26, 32 ... (6 n + 2).")
        self.conv1 = conv3x3(3, 16)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[_Block(16, 16, 1) for _ in range(blocks)])
        self.layer2 = nn.Sequential(_Block(16, 32, 2), *[_Block(32, 32, 1) for _ in range(blocks - 1)])
        self.layer3 = nn.Sequential(_Block(32, 64, 2), *[_Block(64, 64, 1) for _ in range(blocks - 1)])
        self.linear = nn.Linear(64, num_classes)
        initialise(self)

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
        self.shortcut = nn.Sequential(*([] if same else [conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs)]))

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
        initialise(self)

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
