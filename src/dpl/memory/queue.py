"""Ring memories of fixed size, and pseudo-labels by vote of the nearest stored samples.

Positions are integers on the host that depend on batch sizes alone, so that no device is synchronised.
"""

from torch import Tensor

from dpl.core.errors import InputError

__all__ = ["neighbour_vote", "write_ring"]


def write_ring(memory: Tensor, rows: Tensor, start: int) -> int:
    """Write a batch into a ring, in place: a copy of the whole memory would cost more than the batch.

    Args:
        memory: [K, ...].
        rows: [B, ...]; of more than K rows only the last K stay.
        start: position of the first row.

    Returns:
        The position of the next batch.
    """
    if memory.shape[1:] != rows.shape[1:] or len(memory) == 0:
        raise InputError(f"rows have shape {tuple(rows.shape)}, which does not fit a ring of {tuple(memory.shape)}")
    size = len(memory)
    start = (start + max(len(rows) - size, 0)) % size
    rows = rows.detach()[max(0, len(rows) - size) :]
    until_end = min(len(rows), size - start)
    memory[start : start + until_end] = rows[:until_end]
    memory[: len(rows) - until_end] = rows[until_end:]
    return (start + len(rows)) % size


def neighbour_vote(features: Tensor, bank: Tensor, bank_probabilities: Tensor, neighbours: int) -> Tensor:
    """Mean class probabilities of the most similar stored samples, by cosine.

    Args:
        features: [B, d].
        bank: unit vectors of M >= 1 stored samples, [M, d].
        bank_probabilities: their class probabilities, [M, C].
        neighbours: how many vote; all if fewer are stored.

    Returns:
        [B, C].
    """
    if len(bank) == 0 or len(bank) != len(bank_probabilities):
        raise InputError(
            f"the bank holds {len(bank)} features and {len(bank_probabilities)} probabilities; expected as many, "
            "at least one"
        )
    # The length of a row of `features` does not change the order of its neighbours.
    similarity = features.to(bank.dtype) @ bank.T  # [B, M]
    nearest = similarity.topk(min(neighbours, len(bank)), dim=1).indices
    return bank_probabilities[nearest].mean(dim=1)
