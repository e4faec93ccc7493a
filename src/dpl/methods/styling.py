"""Style transfer from samples with unconfident pseudo-labels (Eq. 8 to 10), in both of the paper's ways.

`two_pass`: a first pass over the batch tells confident from unconfident; a second one shows the confident samples in
the style of unconfident ones of the same batch. `carry_over`: unconfident images of the last batch ride along with
the next one up to the style layer and lend their style to copies of all its samples, so one pass is enough.

In both, BatchNorm statistics of a batch are those of its original images alone, so predictions are the same as
without style transfer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dpl.methods.random import Random
from dpl.methods.state import Stateful
from dpl.objectives import restyle, style_statistics
from dpl.surgery import Network, Pass
from dpl.surgery.norm import Recall
from dpl.surgery.style import find_style_layer, prefix_tokens

__all__ = ["STYLES", "STYLE_SOURCES", "StyleTransfer"]

STYLES = ("off", "two_pass", "carry_over")
STYLE_SOURCES = ("unconfident", "all", "confident")
Statistics = tuple[Tensor, Tensor]


class StyleTransfer(Stateful):
    """Runs the forward passes of a batch and makes restyled copies of its confident samples."""

    carried: Tensor | None

    def __init__(self, network: Network, kind: str, layer: str | None, lenders: str, random: Random) -> None:
        super().__init__()
        self.network, self.kind, self.lenders, self.random = network, kind, lenders, random
        self.layer = "" if kind == "off" else find_style_layer(network.module, layer)
        self.prefix = 0 if kind == "off" else prefix_tokens(network.module)
        self._first: tuple[Statistics, Recall] | None = None
        self.declare(carried=None)

    def first_pass(self, images: Tensor) -> tuple[Pass, Pass | None]:
        """Run the batch; return its pass, and that of restyled copies of all its images if they rode along."""
        if self.kind == "two_pass":
            return self._watched_pass(images), None
        if self.kind == "carry_over" and self.carried is not None and self.carried.shape[1:] == images.shape[1:]:
            return self._joint_pass(images, self.carried.to(images))
        return self.network(images), None

    def double(self, out: Pass, labels: Tensor, styled: Pass | None) -> tuple[Tensor, Tensor]:
        """Return the features and labels of the batch, followed by those of its restyled confident samples."""
        if self.kind == "two_pass":
            chosen = (labels >= 0).nonzero().squeeze(1)
            donors = self._lending(labels).nonzero().squeeze(1)
            if len(chosen) and len(donors):
                styled = self._second_pass(out.images[chosen], donors[self.random.integers(len(donors), len(chosen))])
                return torch.cat([out.z, styled.z]), torch.cat([labels, labels[chosen]])
        if styled is None:
            return out.z, labels
        return torch.cat([out.z, styled.z]), torch.cat([labels, labels])

    def carry(self, images: Tensor, labels: Tensor) -> None:
        """Keep the images that lend their style to the next batch."""
        self._first = None
        if self.kind == "carry_over":
            lending = images[self._lending(labels)].detach()
            self.carried = lending if len(lending) else None

    def _lending(self, labels: Tensor) -> Tensor:
        if self.lenders == "all":
            return torch.ones_like(labels, dtype=torch.bool)
        return labels < 0 if self.lenders == "unconfident" else labels >= 0

    def _watched_pass(self, images: Tensor) -> Pass:
        """Run the batch and remember each image's style and each BatchNorm layer's statistics."""
        seen: list[Statistics] = []

        def look(maps: Tensor) -> Tensor:
            seen.append(style_statistics(self._styled_part(maps)))
            return maps

        with self.network.norm.recording() as recorded:
            out = self.network(images, at=self.layer, change=look)
        self._first = seen[-1], Recall(recorded)
        return out

    def _second_pass(self, images: Tensor, donors: Tensor) -> Pass:
        if self._first is None:
            raise RuntimeError("the second pass needs the first one's styles")
        (mean, deviation), recall = self._first
        change = self._on_patches(lambda maps: restyle(maps, mean[donors], deviation[donors]))
        if not recall.statistics:  # running statistics: the rule in force gives the same
            return self.network(images, at=self.layer, change=change)
        with self.network.norm.using(recall):
            return self.network(images, at=self.layer, change=change)

    def _joint_pass(self, images: Tensor, lenders: Tensor) -> tuple[Pass, Pass]:
        """Run [batch; lenders] up to the style layer and [batch; restyled batch] from there on."""
        size = len(images)
        donors = size + self.random.integers(len(lenders), size)

        def replace(maps: Tensor) -> Tensor:
            mean, deviation = style_statistics(self._styled_part(maps))
            copies = self._on_patches(lambda own: restyle(own, mean[donors], deviation[donors]))(maps[:size])
            return torch.cat([maps[:size], copies])

        with self.network.norm.using(rows=size):
            both = self.network(torch.cat([images, lenders]), at=self.layer, change=replace)
        joint = Pass(torch.cat([images, images]), both.logits, both.features)
        return joint[:size], joint[size:]

    def _styled_part(self, maps: Tensor) -> Tensor:
        return maps[:, self.prefix :] if maps.ndim == 3 else maps

    def _on_patches(self, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Leave class and register tokens as they are."""

        def changed(maps: Tensor) -> Tensor:
            if maps.ndim == 4 or self.prefix == 0:
                return change(maps)
            return torch.cat([maps[:, : self.prefix], change(maps[:, self.prefix :])], dim=1)

        return changed
