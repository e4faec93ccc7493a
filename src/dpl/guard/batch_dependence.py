"""Check whether predictions depend on the batch composition.

The statistics of a batch with one class magnify small differences between its images. The predictions then look like
those for many classes, but they change if the batch has other content. To test this, the images are predicted again
together with distractors: rotated copies and rotated negatives. Predictions that were recovered from a shift of all
images stay the same, because the distractors have the same shift.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["distractor_images", "stable_in_larger_batch"]


@torch.no_grad()
def stable_in_larger_batch(predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return for each image whether its prediction stays the same when distractors join the batch [n]."""
    alone = predict(images).argmax(dim=1)
    together = predict(torch.cat([images, distractor_images(images)]))
    return together[: len(images)].argmax(dim=1) == alone


def distractor_images(images: Tensor) -> Tensor:
    """Return images of the same kind with other content: rotated ones, and negatives rotated the other way [2n].

    Inputs that are not images cannot be rotated; only their negatives are returned [n].
    """
    within = [dim for dim in range(images.ndim) if dim != 1]
    negatives = images.amax(dim=within, keepdim=True) + images.amin(dim=within, keepdim=True) - images
    if images.ndim != 4:
        return negatives
    rotated = torch.cat([images.rot90(1, (2, 3)), negatives.rot90(3, (2, 3))])
    size = images.shape[2:]
    return rotated if rotated.shape[2:] == size else F.interpolate(rotated, size=size, mode="bilinear")
