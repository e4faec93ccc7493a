"""What is adapted in one process and in two: networks, a stream with batches of odd sizes, methods."""

import torch
from torch import Tensor, nn

from nets import SmallNet, SmallTokens

# name: method, settings, network. Under batch statistics a convolution's bias has no influence, nor has the bias of
# attention's keys; their gradients are rounding alone, which Adam would blow up to the learning rate. There only affine
# parameters train, or SGD steps.
CASES: dict[str, tuple[str, dict, str]] = {
    "dpl": ("dpl", {"lr": 1e-3, "confidence": 0.42}, "batch"),
    "dpl_batch": ("dpl", {"lr": 1e-3, "confidence": 0.42, "norm": "batch", "scope": "affine", "steps": 2}, "batch"),
    "dpl_blend": ("dpl", {"lr": 1e-3, "confidence": 0.42, "norm": 0.4}, "batch"),
    "dpl_track": ("dpl", {"lr": 1e-3, "confidence": 0.42, "norm": "track", "scope": "affine"}, "batch"),
    "dpl_tokens": ("dpl_dagger", {"lr": 1e-3, "confidence": 0.8, "optimizer": "sgd"}, "tokens"),
    "dpl_guarded": ("dpl", {"lr": 1e-3, "confidence": 0.42, "guard": True}, "batch"),
    "dpl_star": ("dpl_star", {"lr": 1e-3, "confidence": 0.42, "optimizer": "sgd"}, "batch"),
    "dpl_o": ("dpl_o", {"lr": 1e-3, "confidence": 0.42}, "batch"),
    "dpl_o_batch": ("dpl_o", {"lr": 1e-3, "confidence": 0.42, "norm": "batch", "optimizer": "sgd"}, "batch"),
    "two_pass": ("dpl_dagger", {"lr": 1e-3, "confidence": 0.42, "style": "two_pass"}, "batch"),
    "two_pass_batch": (
        "dpl_dagger",
        {"lr": 1e-3, "confidence": 0.42, "style": "two_pass", "norm": "batch", "scope": "affine"},
        "batch",
    ),
    "carry_over": ("dpl_dagger", {"lr": 1e-3, "confidence": 0.42, "style": "carry_over"}, "batch"),
    "carry_over_batch": (
        "dpl_dagger",
        {"lr": 1e-3, "confidence": 0.42, "style": "carry_over", "norm": "batch", "scope": "affine"},
        "batch",
    ),
    "tent": ("tent", {"lr": 1e-3}, "batch"),
    "tent+dpl": ("tent+dpl", {"lr": 1e-3, "dpl_confidence": 0.42}, "batch"),
    "eata+dpl": ("eata+dpl", {"lr": 1e-3, "dpl_confidence": 0.42, "source": True}, "batch"),
    "sar": ("sar", {"lr": 1e-3, "margin": 1.0}, "batch"),
    "shot_im": ("shot_im", {"lr": 1e-3}, "batch"),
}


def make_network(kind: str) -> nn.Module:
    """Return a network with bold answers, so that some samples are confident and some are not."""
    torch.manual_seed(0)
    network = SmallTokens() if kind == "tokens" else SmallNet(kind)
    head = network.head if kind == "tokens" else network.fc
    head.weight.data.mul_(8)
    head.bias.data.zero_()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return network


def make_stream() -> list[Tensor]:
    """Return batches of an even size, an odd one and a single image."""
    generator = torch.Generator().manual_seed(1)
    return [_images(size, generator) for size in (16, 16, 13, 1, 16)]


def _images(count: int, generator: torch.Generator) -> Tensor:
    """Return noise of a colour and a strength of its own in each image, so that networks tell them apart."""
    colour = torch.randn(count, 3, 1, 1, generator=generator)
    return colour + torch.rand(count, 1, 1, 1, generator=generator) * torch.randn(count, 3, 12, 12, generator=generator)


def make_source() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(24, 3, 12, 12, generator=generator), torch.arange(24) % 5
