"""A bank of features with their predictions, of which the nearest vote for the label of a sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.state import Stateful
from dpl.memory.queue import neighbour_vote, write_ring
from dpl.network import Network, Pass

__all__ = ["NeighbourBank"]


class NeighbourBank(Stateful):
    """What a method adds that has such a bank; it stands before the method's base class."""

    bank: Tensor  # [K, d], unit vectors; the first `bank_filled` rows are in use
    bank_probabilities: Tensor  # [K, C]
    bank_next: int
    bank_filled: int

    def declare_bank(self, network: Network, size: int) -> None:
        """Start with an empty bank for `size` samples."""
        like = network.prototypes.detach()
        empty, uncertain = like.new_zeros(size, network.classifier.in_features), like.new_zeros(size, len(like))
        self.declare(bank=empty, bank_probabilities=uncertain, bank_next=0, bank_filled=0)
        self.change_in_place("bank", "bank_probabilities")

    def voted(self, features: Tensor, neighbours: int) -> Tensor:
        """Return the class for which the nearest in the bank vote."""
        known = slice(self.bank_filled)
        return neighbour_vote(features, self.bank[known], self.bank_probabilities[known], neighbours).argmax(dim=1)

    @torch.no_grad()
    def fill_bank(self, out: Pass, *, overwrite_newest: bool) -> None:
        """Put the samples of a pass into the bank; once full, it may first overwrite its newest ones again."""
        size, was_filled = len(self.bank), self.bank_filled
        write_ring(self.bank_probabilities, out.probabilities, self.bank_next)
        self.bank_next = write_ring(self.bank, F.normalize(out.z, dim=1), self.bank_next)
        self.bank_filled = min(was_filled + len(out.z), size)
        if overwrite_newest and was_filled < self.bank_filled == size:
            self.bank_next = (self.bank_next - len(out.z)) % size
