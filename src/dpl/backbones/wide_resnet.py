"""Pre-activation Wide ResNet (Zagoruyko and Komodakis, 2016) for 32-pixel images.

Parameter names are those of the checkpoints in circulation: `block1..3.layer.N` and `fc` (RobustBench), or
`layer1..3.layer.N` and `linear` when `stage` and `head` say so.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones.layers import conv1x1, conv3x3, initialise
from dpl.core.errors import SettingError

__all__ = ["WideResNet"]


class _Block(nn.Module):
    """BN-ReLU-conv twice; where the width changes, the shortcut too starts from the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.convShortcut = conv1x1(inputs, outputs, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(active)
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + shortcut


class _Stage(nn.Module):
    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        rest = [_Block(outputs, outputs, 1) for _ in range(blocks - 1)]
        self.layer = nn.Sequential(_Block(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


class WideResNet(nn.Module):
    """WRN-`depth`-`width`: three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times `width` channels."""

    def __init__(self, depth: int, width: int, num_classes: int, *, stage: str = "block", head: str = "fc") -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 4, 6)
        if remainder or blocks < 1:
            raise SettingError(f"depth={depth} is no Wide ResNet; expected 10, 16, 22, 28 ... (6 n + 4).")
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = conv3x3(3, channels[0])
        self._stages = [f"{stage}{i}" for i in (1, 2, 3)]
        for i, name in enumerate(self._stages):
            self.add_module(name, _Stage(blocks, channels[i], channels[i + 1], 1 if i == 0 else 2))
        self.bn1 = nn.BatchNorm2d(channels[3])
        self._head = head
        self.add_module(head, nn.Linear(channels[3], num_classes))
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, H, W]."""
        x = self.conv1(images)
        for name in self._stages:
            x = self.get_submodule(name)(x)
        features = F.relu(self.bn1(x)).mean(dim=(2, 3))  # [B, 64 width]
        logits: Tensor = self.get_submodule(self._head)(features)
        return logits
