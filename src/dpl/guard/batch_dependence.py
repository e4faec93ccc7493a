"""Do the answers to a batch survive in other company?

Statistics of a batch of one class magnify what little its rows differ in, and the answers look like those to many
classes. They belong to the batch, not to the rows: beside rows of another content (the same rows turned by a quarter,
as they are and as negatives) they change. Answers that were recovered from a shift of all rows alike stay, since the
turned rows have the same shift.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["answers_kept", "company_of"]


@torch.no_grad()
def answers_kept(predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return for each row whether its answer is the same in a larger batch [n]."""
    alone = predict(images).argmax(dim=1)
    together = predict(torch.cat([images, company_of(images)]))
    return together[: len(images)].argmax(dim=1) == alone


def company_of(images: Tensor) -> Tensor:
    """Return rows of the same kind and another content: turned, and turned the other way with light for dark [2n].

    Rows that are not pictures cannot be turned; theirs are the negatives alone [n].
    """
    within = [dim for dim in range(images.ndim) if dim != 1]
    negatives = images.amax(dim=within, keepdim=True) + images.amin(dim=within, keepdim=True) - images
    if images.ndim != 4:
        return negatives
    turned = torch.cat([images.rot90(1, (2, 3)), negatives.rot90(3, (2, 3))])
    size = images.shape[2:]
    return turned if turned.shape[2:] == size else F.interpolate(turned, size=size, mode="bilinear")
