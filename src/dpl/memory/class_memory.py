"""The memory of class pseudo-features (Eq. 5)."""

from torch import Tensor

from dpl.core.errors import InputError, SettingError

__all__ = ["update_class_memory"]


def update_class_memory(memory: Tensor, features: Tensor, labels: Tensor, momentum: float) -> Tensor:
    """Eq. 5: move each present class towards the mean of its confident features.

    Args:
        memory: z*, [C, d].
        features: z, [B, d].
        labels: pseudo-labels [B], -1 for a sample that takes no part.
        momentum: eta, the weight of the old pseudo-feature.

    Returns:
        A new memory, in which classes without a confident sample are unchanged. Gradients flow to `features`.
    """
    if not 0 <= momentum <= 1:
        raise SettingError(f"momentum={momentum!r}: expected a number from 0 to 1 (0.9 is the default)")
    if features.shape != (len(labels), memory.shape[1]):
        raise InputError(f"features have shape {tuple(features.shape)}; expected [{len(labels)}, {memory.shape[1]}]")
    valid = labels >= 0
    rows = labels.clamp(min=0)
    size = (labels[:, None] == labels[None, :]).sum(dim=1)
    # eta m + (1 - eta) mean(z) = m + sum of (1 - eta)/|Z| (z_i - m): only present rows are touched.
    weight = (1 - momentum) * valid.to(memory.dtype) / size
    return memory.index_add(0, rows, weight[:, None] * (features.to(memory.dtype) - memory[rows]))
