"""Style transfer between the samples of a batch, on the feature maps of an early layer (AdaIN, Eq. 8 to 10)."""

from dataclasses import replace

import torch
from torch import Tensor

from dpl.core.errors import ModelError
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.methods.parts.norm_rules import RecordedStatistics
from dpl.network import Network, Pass
from dpl.network.style_layer import at_layer, find_style_layer, prefix_tokens
from dpl.objectives import confident_labels, restyle, style_statistics

__all__ = ["StyleTransfer"]


class StyleTransfer(Stateful):
    """Appends to a pass its confident samples in the style of others: of the same batch, or of the last (`carry`)."""

    carried: Tensor | None  # [2, B, ...], means and deviations of the last batch
    carried_lends: Tensor | None  # [B], which of its images lend their style

    def __init__(self, network: Network, random: Random, layer: str | None, lenders: str, *, carry: bool) -> None:
        super().__init__()
        self.network, self.random, self.lenders, self.carry = network, random, lenders, carry
        self.layer = network.style_layer = find_style_layer(network.module, layer)
        self.prefix = prefix_tokens(network.module)  # class and register tokens have no style
        self.declare(carried=None, carried_lends=None)

    def extend(self, out: Pass, confidence: float) -> Pass:
        """Return the pass with restyled copies of its confident samples; each keeps its sample's label."""
        styles, lends = self._styles(out, confidence)
        rows = _rows_to_copy(out, confidence)
        if styles is None or lends is None or len(rows) == 0 or (lends.device.type == "cpu" and not bool(lends.any())):
            return out
        chance = self.random.uniform(len(out.whole))  # for every image, so that all devices draw the same
        mean, deviation = styles[:, _pick(lends, chance[_batch_rows(out)[rows]])]
        change = at_layer(self.network.module, self.layer, lambda maps: self._restyled(maps, mean, deviation))
        # The copies are normalised as the batch was, and do not enter its statistics.
        with self.network.norm.using(RecordedStatistics(out.statistics) if out.statistics else None), change:
            copies = self.network(out.images[rows])
        labelled_by = torch.where(lends.any(), out.reference[rows], torch.nan)  # no lender: no label
        return replace(
            out,
            images=torch.cat([out.images, copies.images]),
            logits=torch.cat([out.logits, copies.logits]),
            features=torch.cat([out.z, copies.z]),
            reference=torch.cat([out.reference, labelled_by]),
        )

    def _styles(self, out: Pass, confidence: float) -> tuple[Tensor | None, Tensor | None]:
        """Return the means and deviations (Eq. 8, 9) of this batch, or of the last, and who lends them, a mask."""
        if out.maps is None:
            raise ModelError(f"style_layer={self.layer!r} was not used in the forward pass; name another one")
        styles = torch.stack(style_statistics(self._patches(out.maps)))
        confident = confident_labels(out.whole, confidence) >= 0
        lends = {"unconfident": ~confident, "all": confident | True, "confident": confident}[self.lenders]
        if not self.carry:
            return styles, lends
        last = self.carried, self.carried_lends
        self.carried, self.carried_lends = styles, lends
        return last

    def _patches(self, maps: Tensor) -> Tensor:
        return maps[:, self.prefix :] if maps.ndim == 3 else maps

    def _restyled(self, maps: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        patches = restyle(self._patches(maps), mean, deviation)  # Eq. 10
        return patches if maps.ndim == 4 else torch.cat([maps[:, : self.prefix], patches], dim=1)


def _rows_to_copy(out: Pass, confidence: float) -> Tensor:
    """Return the confident rows where it is cheap to know them, else all rows."""
    confident = confident_labels(out.reference, confidence) >= 0
    if confident.device.type == "cpu":
        return confident.nonzero().flatten()
    return torch.arange(len(confident), device=confident.device)


def _batch_rows(out: Pass) -> Tensor:
    """Return the place in the batch of each row of a pass."""
    if out.candidates is None or len(out.images) == len(out.whole):
        return torch.arange(len(out.images), device=out.images.device)
    return out.candidates.nonzero().flatten()


def _pick(lends: Tensor, chance: Tensor) -> Tensor:
    """Return one of the lenders for each number in [0, 1), all with the same probability."""
    lenders_first = lends.int().argsort(descending=True, stable=True)
    count = lends.sum()
    return lenders_first[torch.minimum((chance * count).long(), count - 1).clamp(min=0)]
