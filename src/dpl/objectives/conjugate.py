"""The conjugate loss of a PolyLoss-trained classifier."""

import torch.nn.functional as F
from torch import Tensor

from dpl.core.errors import SettingError
from dpl.core.numerics import full_precision

__all__ = ["conjugate_loss"]


@full_precision
def conjugate_loss(logits: Tensor, epsilon: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Loss of each sample under its own conjugate pseudo-label, for a source trained with PolyLoss: [B, C] -> [B].

    With h = logits / temperature and p = softmax(h), the conjugate label y solves

        (I + epsilon diag(p) - epsilon p p^T) y = p,    loss = log sum_k exp(h_k) - sum_k y_k (h_k - epsilon (1 - p_k)).

    By Sherman and Morrison's formula y_k is proportional to p_k / (1 + epsilon p_k) and sums to one: no system has to
    be solved. Gradients flow through y. With epsilon = 0 (a cross-entropy source) this is the entropy of p.
    """
    if not (epsilon >= 0 and temperature > 0):
        raise SettingError(
            f"epsilon={epsilon!r}, temperature={temperature!r}: expected an epsilon of at least 0 "
            "(0 for a source trained with cross-entropy) and a temperature above 0"
        )
    log_p = F.log_softmax(logits / temperature, dim=1)
    p = log_p.exp()
    unscaled = p / (1 + epsilon * p)
    label = unscaled / unscaled.sum(dim=1, keepdim=True)
    return -(label * (log_p - epsilon * (1 - p))).sum(dim=1)
