"""The layer whose maps carry the style of an image, and ways to read or change its output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dpl.core.errors import ModelError

__all__ = ["at_layer", "find_style_layer", "prefix_tokens"]

# The end of the first stage in common families, most specific first; each is looked for as a suffix.
_FIRST_STAGES = (
    "layer1",  # ResNets of torchvision, timm, CIFAR
    "block1",  # Wide ResNets
    "stage_1",  # CIFAR ResNeXt
    "stages.0",  # ConvNeXt, RegNet, Hugging Face ResNet
    "features.denseblock1",
    "encoder.layers.encoder_layer_0",  # torchvision ViT
    "encoder.layer.0",  # Hugging Face ViT
    "layers.0",  # Swin
    "blocks.0",  # timm ViT, Mixer, EfficientNet
    "features.1",  # torchvision MobileNet, EfficientNet
)


def find_style_layer(module: nn.Module, name: str | None = None) -> str:
    """Return the name of the layer whose output is restyled: the given one, or the end of the first stage."""
    names: list[str] = [key for key, _ in module.named_modules() if key]
    if name is not None:
        if name in names:
            return name
        raise ModelError(f"style_layer={name!r} is not a module of this network; it has {', '.join(names[:12])}, ...")
    stages = [key for stage in _FIRST_STAGES for key in names if f".{key}".endswith(f".{stage}")]
    kinds = (nn.Conv2d, nn.TransformerEncoderLayer)
    found = stages or [key for key in names if isinstance(module.get_submodule(key), kinds)]
    if not found:
        problem = "no layer for style transfer found (no first stage, no convolution)"
        raise ModelError(f"{problem}; name it with style_layer='...'")
    return found[0]


def prefix_tokens(module: nn.Module) -> int:
    """Return how many leading tokens of a sequence are not image patches (class and register tokens)."""
    for child in module.modules():
        count = getattr(child, "num_prefix_tokens", None)
        if isinstance(count, int):
            return count
    names = [name for name, _ in module.named_parameters()]
    return sum(any(name.endswith(end) for name in names) for end in ("cls_token", "class_token", "dist_token"))


@contextmanager
def at_layer(module: nn.Module, layer: str, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Pass the output of `layer` through `change` inside the block; it stays where `change` returns None."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return change(output)
        changed = change(output[0])
        return None if changed is None else (changed, *output[1:])

    with module.get_submodule(layer).register_forward_hook(hook):
        yield
