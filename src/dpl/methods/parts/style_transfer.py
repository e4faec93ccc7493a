"""Style transfer between the samples of a batch, on the feature maps of an early layer (AdaIN, Eq. 8 to 10)."""

from dataclasses import replace

import torch
from torch import Tensor

from dpl.core.errors import ModelError
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.network import Network, Pass
from dpl.network.norm import RecordedStatistics
from dpl.network.style_layer import at_layer, find_style_layer, prefix_tokens
from dpl.objectives import confident_labels, restyle, style_statistics

__all__ = ["StyleTransfer"]


class StyleTransfer(Stateful):
    """Appends to a pass its confident samples in the style of others: of the same batch, or of the last (`carry`)."""

    carried: Tensor | None  # [2, n, ...], the means and deviations that the last batch lends to this one

    def __init__(self, network: Network, random: Random, layer: str | None, lenders: str, *, carry: bool) -> None:
        super().__init__()
        self.network, self.random, self.lenders, self.carry = network, random, lenders, carry
        self.layer = network.style_layer = find_style_layer(network.module, layer)
        self.prefix = prefix_tokens(network.module)  # class and register tokens have no style
        self.declare(carried=None)

    def extend(self, out: Pass, confidence: float) -> Pass:
        """Return the pass with restyled copies of its confident samples; each keeps its sample's label."""
        styles = own = self._lent(out, confidence)
        if self.carry:
            styles, self.carried = self.carried, own
        rows = (confident_labels(out.reference, confidence) >= 0).nonzero().flatten()
        if styles is None or len(rows) == 0:
            return out
        mean, deviation = styles[:, self.random.integers(styles.shape[1], len(rows))]
        change = at_layer(self.network.module, self.layer, lambda maps: self._restyled(maps, mean, deviation))
        # The copies are normalised as the batch was, and do not enter its statistics.
        with self.network.norm.using(RecordedStatistics(out.statistics) if out.statistics else None), change:
            copies = self.network(out.images[rows])
        return replace(
            out,
            images=torch.cat([out.images, copies.images]),
            logits=torch.cat([out.logits, copies.logits]),
            features=torch.cat([out.z, copies.z]),
            reference=torch.cat([out.reference, out.reference[rows]]),
        )

    def _lent(self, out: Pass, confidence: float) -> Tensor | None:
        """Return the means and deviations (Eq. 8, 9) of those that lend their style; None: nobody does."""
        if out.maps is None:
            raise ModelError(f"style_layer={self.layer!r} was not used in the forward pass; name another one")
        confident = confident_labels(out.whole, confidence) >= 0
        lend = {"unconfident": ~confident, "all": confident | True, "confident": confident}[self.lenders]
        styles = torch.stack(style_statistics(self._patches(out.maps)))[:, lend]
        return styles if styles.shape[1] else None

    def _patches(self, maps: Tensor) -> Tensor:
        return maps[:, self.prefix :] if maps.ndim == 3 else maps

    def _restyled(self, maps: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        patches = restyle(self._patches(maps), mean, deviation)  # Eq. 10
        return patches if maps.ndim == 4 else torch.cat([maps[:, : self.prefix], patches], dim=1)
