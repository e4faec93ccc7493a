"""Losses whose gradient does not vanish with confidence as that of the entropy does."""

from torch import Tensor

from dpl.core.numerics import full_precision

__all__ = ["soft_likelihood_ratio"]


@full_precision
def soft_likelihood_ratio(logits: Tensor, ceiling: float = 0.99, eps: float = 1e-5) -> Tensor:
    """-sum_c q_c log(q_c / (1 - q_c)) with q = softmax(logits), [B, C] -> [B] (Mummadi et al., 2021).

    Probabilities stop at `ceiling`: above it a class asks for nothing more. `eps` keeps the logarithm finite.
    """
    q = logits.softmax(dim=1).clamp(max=ceiling)
    return -(q * (q / (1 - q) + eps).log()).sum(dim=1)
