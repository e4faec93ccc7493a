"""What a user hands to an adaptive model, checked: images, and labelled source data."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dpl.core.errors import InputError, SettingError
from dpl.core.numerics import is_autocast_on
from dpl.methods.base import Source
from dpl.network import Network
from dpl.views import check_images

__all__ = ["Labelled", "as_batches", "checked_images", "with_advice"]

Labelled = Source | tuple[Tensor, Tensor] | None  # batches of (images, labels), or one such pair

_SOURCE_BATCH = 64


def as_batches(source: Labelled) -> Source | None:
    """Cut one pair of tensors into batches; leave a loader as it is."""
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor):
        images, labels = source
        starts = range(0, len(images), _SOURCE_BATCH)
        return [(images[i : i + _SOURCE_BATCH], labels[i : i + _SOURCE_BATCH]) for i in starts]
    if isinstance(source, Iterator):
        raise SettingError(
            "source is an iterator that can be read only once: pass a loader, a list of batches or a pair"
        )
    return source


def checked_images(images: Tensor, network: Network, *, finite: bool, in_range: bool) -> Tensor:
    """Return images without a graph; refuse what is no batch of them, or does not fit the network's device and type.

    If `finite`, refuse NaN and infinity (a guard excludes such images itself); if `in_range`, also values outside
    [0, 1], which built-in views need.
    """
    problem = ""
    if not isinstance(images, Tensor):
        problem = f"is {type(images).__name__}: expected a torch.Tensor [batch, channels, ...]"
    elif images.ndim < 2 or len(images) == 0:
        problem = f"has shape {tuple(images.shape)}: expected a non-empty batch [batch, ...]"
    elif not images.is_floating_point():
        problem = f"has dtype {images.dtype}: expected floating point; use images.float() / 255"
    elif images.device != network.device:
        problem = f"is on {images.device}, the model on {network.device}; move one of them"
    elif images.dtype != network.dtype and not is_autocast_on(images.device):
        problem = f"has dtype {images.dtype}, the model {network.dtype}; use images.to({network.dtype})"
    elif finite:
        # The one read that every method shares: two numbers, before the work of the batch is queued.
        low, high = torch.stack(images.detach().aminmax()).tolist()
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = (~images.isfinite().flatten(1).all(dim=1)).nonzero().flatten().tolist()
            problem = f"has non-finite values in rows {bad[:8]}; drop those rows and call again"
        elif in_range:
            check_images(images, (low, high))
    if problem:
        raise InputError(f"images {problem}")
    return images.clone() if images.is_inference() else images.detach()


def with_advice(error: BaseException, images: Tensor) -> BaseException:
    """Return the error of a step; where memory ran out, with what to do."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
    if not out_of_memory:
        return error
    advice = f"a batch of {len(images)} images needs more memory than there is; nothing has changed"
    return type(error)(f"{advice}: use a smaller batch ({error})")
