"""ResNeXt-29 (Xie et al., 2017) for 32-pixel images, with the parameter names of AugMix and RobustBench."""

import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones.layers import conv1x1, conv3x3, initialise

__all__ = ["ResNeXt29"]

_EXPANSION = 4


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, planes: int, stride: int, groups: int, group_width: int) -> None:
        super().__init__()
        width, outputs = groups * planes * group_width // 64, planes * _EXPANSION
        self.conv_reduce = conv1x1(inputs, width)
        self.bn_reduce = nn.BatchNorm2d(width)
        self.conv_conv = conv3x3(width, width, stride, groups)
        self.bn = nn.BatchNorm2d(width)
        self.conv_expand = conv1x1(width, outputs)
        self.bn_expand = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        projection = None if same else nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))
        self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn_reduce(self.conv_reduce(x)))
        x = F.relu(self.bn(self.conv_conv(x)))
        return F.relu(self.bn_expand(self.conv_expand(x)) + shortcut)


class ResNeXt29(nn.Module):
    """Three stages of three bottlenecks, 64 to 1,024 channels; `groups` x `group_width` is 4 x 32 in AugMix."""

    def __init__(self, num_classes: int, *, groups: int = 4, group_width: int = 32) -> None:
        super().__init__()
        self.conv_1_3x3 = conv3x3(3, 64)
        self.bn_1 = nn.BatchNorm2d(64)
        self.stage_1 = _stage(64, 64, 1, groups, group_width)
        self.stage_2 = _stage(256, 128, 2, groups, group_width)
        self.stage_3 = _stage(512, 256, 2, groups, group_width)
        self.classifier = nn.Linear(256 * _EXPANSION, num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, H, W]."""
        x = F.relu(self.bn_1(self.conv_1_3x3(images)))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        logits: Tensor = self.classifier(x.mean(dim=(2, 3)))  # features [B, 1024]
        return logits


def _stage(inputs: int, planes: int, stride: int, groups: int, group_width: int) -> nn.Sequential:
    first = _Bottleneck(inputs, planes, stride, groups, group_width)
    rest = [_Bottleneck(planes * _EXPANSION, planes, 1, groups, group_width) for _ in range(2)]
    return nn.Sequential(first, *rest)
