"""A zero-shot classifier: an image encoder, and the embeddings of class descriptions as prototypes."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.errors import ModelError, SettingError

__all__ = ["ZeroShot", "zero_shot"]

_CALLS = ("get_image_features", "encode_image", "forward")


def zero_shot(image_encoder: nn.Module, text_features: Tensor, scale: float = 100.0) -> nn.Module:
    """Return a classifier with logits `scale * cos(image, text)`, which every method adapts like any other.

    Args:
        image_encoder: a module that maps images to embeddings [B, d]; or a CLIP- or SigLIP-like model with
            `encode_image` (open_clip) or `get_image_features` (transformers).
        text_features: one embedding for each class, [C, d]; they need not be normalised.
        scale: the inverse temperature, `exp(logit_scale)` of a CLIP model.

    The linear layer `classifier` holds the text embeddings. Embeddings of images and texts both have the length
    sqrt(scale), so that their inner product is the logit and neither outweighs the other in a class memory.
    SigLIP's `logit_bias` is left out: it is the same for all classes and changes no probability.
    """
    if not isinstance(image_encoder, nn.Module):
        raise SettingError(f"image_encoder is {type(image_encoder).__name__}: expected a torch.nn.Module")
    if not isinstance(text_features, Tensor) or text_features.ndim != 2 or len(text_features) < 2:
        shape = tuple(text_features.shape) if isinstance(text_features, Tensor) else type(text_features).__name__
        raise SettingError(f"text_features is {shape}: expected a tensor [classes, dimensions] of at least two classes")
    if not text_features.isfinite().all() or (text_features.norm(dim=1) == 0).any():
        raise SettingError("text_features has a row that is zero or not finite; embed every class description")
    if not (math.isfinite(scale) and scale > 0):
        raise SettingError(f"scale={scale!r}: expected a positive number, such as 100")
    return ZeroShot(image_encoder, text_features, scale).eval()


class ZeroShot(nn.Module):
    """Cosine similarity between images and class descriptions, times a scale."""

    def __init__(self, image_encoder: nn.Module, text_features: Tensor, scale: float) -> None:
        super().__init__()
        self.image_encoder, self._call = _image_tower(image_encoder)
        self.length = math.sqrt(scale)
        classes, dimensions = text_features.shape
        like = next(image_encoder.parameters(), text_features)
        self.classifier = nn.Linear(dimensions, classes, bias=False, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            self.classifier.weight.copy_(self.length * F.normalize(text_features.float(), dim=1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, C]."""
        embeddings = _embeddings(getattr(self.image_encoder, self._call)(images))
        if embeddings.ndim != 2 or embeddings.shape[1] != self.classifier.in_features:
            raise ModelError(
                f"image_encoder returned {tuple(embeddings.shape)}; expected [batch, {self.classifier.in_features}], "
                "as wide as text_features"
            )
        logits: Tensor = self.classifier(self.length * F.normalize(embeddings, dim=1))
        return logits


def _image_tower(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that embeds images, without a text encoder if it can be left out, and the name of its call."""
    visual = getattr(model, "visual", None)
    if isinstance(visual, nn.Module) and hasattr(model, "encode_image"):
        return visual, "forward"
    return model, next(call for call in _CALLS if hasattr(model, call))


def _embeddings(output: Any) -> Tensor:
    """Return the embeddings in an encoder's output: a tensor, or what transformers' models return."""
    for name in ("image_embeds", "pooler_output"):
        if getattr(output, name, None) is not None:
            output = getattr(output, name)
    if not isinstance(output, Tensor):
        raise ModelError(f"image_encoder returned {type(output).__name__}; expected embeddings [batch, dimensions]")
    return output
