"""Other classifiers for a network: embeddings of class descriptions, or the rows of the classes that a test set has."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.errors import ModelError, SettingError
from dpl.network.split import find_classifier

__all__ = ["ZeroShot", "keep_classes", "zero_shot"]

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
        self.image_encoder, self._call = image_encoder, next(call for call in _CALLS if hasattr(image_encoder, call))
        visual = getattr(image_encoder, "visual", None)
        if isinstance(visual, nn.Module) and hasattr(image_encoder, "encode_image"):
            self.image_encoder, self._call = visual, "forward"  # without the text encoder
        self.length = math.sqrt(scale)
        classes, dimensions = text_features.shape
        like = next(image_encoder.parameters(), text_features)
        self.classifier = nn.Linear(dimensions, classes, bias=False, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            self.classifier.weight.copy_(self.length * F.normalize(text_features.float(), dim=1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, C]."""
        embeddings = getattr(self.image_encoder, self._call)(images)
        for name in ("image_embeds", "pooler_output"):  # of transformers' models
            if getattr(embeddings, name, None) is not None:
                embeddings = getattr(embeddings, name)
        found, wide = list(getattr(embeddings, "shape", [])) or type(embeddings).__name__, self.classifier.in_features
        if not isinstance(embeddings, Tensor) or embeddings.ndim != 2 or embeddings.shape[1] != wide:
            raise ModelError(f"image_encoder returned {found}; expected [batch, {wide}], as wide as text_features")
        logits: Tensor = self.classifier(self.length * F.normalize(embeddings, dim=1))
        return logits


def keep_classes(network: nn.Module, outputs: Sequence[int], classifier: str | None = None) -> nn.Module:
    """Keep the rows `outputs` of the linear classifier of `network`, in this order; return the network.

    ImageNet-R and ImageNet-A are evaluated in this way: `keep_classes(network, benchmark.outputs)`.
    """
    name = find_classifier(network, classifier)
    layer = network.get_submodule(name)
    if not isinstance(layer, nn.Linear) or "weight" not in dict(layer.named_parameters()):
        raise ModelError(f"classifier {name!r} is not a plain nn.Linear; its rows cannot be selected")
    rows = torch.as_tensor(list(outputs), dtype=torch.long)
    if len(rows) < 2 or len(set(outputs)) < len(rows) or rows.min() < 0 or rows.max() >= layer.out_features:
        raise SettingError(f"outputs: expected at least two different numbers from 0 to {layer.out_features - 1}")
    layer.out_features = len(rows)
    layer.weight = nn.Parameter(layer.weight.detach()[rows])
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[rows])
    return network
