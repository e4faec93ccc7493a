"""Tiny networks of the usual families: seconds on a CPU, for tests, examples and dry runs."""

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.backbones.cifar import MeanPool, conv3x3

__all__ = ["DebugCNN", "DebugTransformer"]

_PATCHES, _HEADS = 16, 4


class DebugCNN(nn.Sequential):
    """Three convolution stages of 8, 16 and 32 channels with a norm layer each; 32 features."""

    def __init__(self, num_classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        layers: dict[str, nn.Module] = {
            f"layer{i}": nn.Sequential(conv3x3(inputs, outputs, stride), norm(outputs), nn.ReLU())
            for i, (inputs, outputs, stride) in enumerate(((3, 8, 1), (8, 16, 2), (16, 32, 2)), 1)
        }
        super().__init__(OrderedDict(layers, pool=MeanPool(), fc=nn.Linear(32, num_classes)))


class DebugTransformer(nn.Module):
    """Two blocks over 4 x 4 patches of 8 pixels: a vision transformer with a class token, or an MLP-Mixer without."""

    def __init__(self, num_classes: int, class_token: bool, width: int = 32) -> None:
        super().__init__()
        self.num_prefix_tokens = int(class_token)  # timm's word for tokens that are no patches
        self.patch_embed = nn.Conv2d(3, width, 8, stride=8)
        if class_token:
            self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
            self.pos_embed = nn.Parameter(torch.randn(1, 1 + _PATCHES, width) * 0.02)
        self.blocks = nn.Sequential(
            *(_Block(width, _Attention(width) if class_token else _TokenMixing()) for _ in range(2))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, 32, 32]."""
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2)  # [B, 16, width]
        if self.num_prefix_tokens:
            tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), tokens], dim=1) + self.pos_embed
        seen = self.norm(self.blocks(tokens))
        logits: Tensor = self.head(seen[:, 0] if self.num_prefix_tokens else seen.mean(dim=1))  # features [B, width]
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, mix: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mix = mix
        self.norm2 = nn.LayerNorm(width)
        self.mlp = _mlp(width)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.mix(self.norm1(tokens))
        result: Tensor = tokens + self.mlp(self.norm2(tokens))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        split = self.qkv(tokens).unflatten(-1, (3, _HEADS, -1))  # [B, T, 3, heads, width / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, width / heads]
        mixed: Tensor = self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return mixed


class _TokenMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _mlp(_PATCHES)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.mlp(tokens.transpose(1, 2))
        return mixed.transpose(1, 2)


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
