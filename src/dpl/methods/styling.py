"""Style transfer from samples with unconfident pseudo-labels (Eq. 8 to 10), in both of the paper's ways.

`two_pass`: a first pass over the batch tells confident from unconfident; a second one shows the confident samples in
the style of unconfident ones of the same batch. `carry_over`: unconfident images of the last batch lend their style
to the confident samples of the next.

Either way the second run starts at the style layer, from what the first one computed there (`surgery.replay`), and
images that only lend their style run up to that layer, without a graph. BatchNorm statistics of a batch are those of
its original images alone, so predictions are the same as without style transfer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.network import Network, Pass
from dpl.network.norm import Recall, Running
from dpl.network.replay import Outputs, Replay
from dpl.network.style_layer import find_style_layer, prefix_tokens, run_up_to
from dpl.objectives import restyle, style_statistics

__all__ = ["STYLES", "STYLE_SOURCES", "StyleTransfer"]

STYLES = ("off", "two_pass", "carry_over")
STYLE_SOURCES = ("unconfident", "all", "confident")
Statistics = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _FirstPass:
    """What the second run of a batch needs of the first."""

    maps: Tensor  # at the style layer
    statistics: Recall  # what each BatchNorm layer used; empty where that is the source's
    outputs: Outputs | None  # of everything up to the style layer, if the network can start there


class StyleTransfer(Stateful):
    """Runs the forward passes of a batch and makes restyled copies of its confident samples."""

    carried: Tensor | None

    def __init__(self, network: Network, kind: str, layer: str | None, lenders: str, random: Random) -> None:
        super().__init__()
        self.network, self.kind, self.lenders, self.random = network, kind, lenders, random
        if kind != "off":
            self.layer = find_style_layer(network.module, layer)
            self.prefix = prefix_tokens(network.module)
            self.replay = Replay(network.module, self.layer)
        self._first: _FirstPass | None = None
        self.declare(carried=None)

    def first_pass(self, images: Tensor) -> Pass:
        """Run the batch, and keep what a second run will need."""
        if self.kind == "off" or (self.kind == "carry_over" and not self._lenders_for(images)):
            return self.network.selecting(images)
        return self._watched_pass(images)

    def double(self, out: Pass, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and labels of the batch, followed by those of its restyled confident samples."""
        chosen = (labels >= 0).nonzero().squeeze(1) if self._first is not None else labels[:0]
        style = self._styles(labels, len(chosen)) if len(chosen) else None
        if style is None or self._first is None:
            return out.z, labels
        styled = self._second_pass(out.images, chosen, style, self._first)
        return torch.cat([out.z, styled]), torch.cat([labels, labels[chosen]])

    def carry(self, images: Tensor, labels: Tensor) -> None:
        """Keep the images that lend their style to the next batch."""
        self._first = None
        if self.kind == "carry_over":
            lending = images[self._lending(labels)].detach()
            self.carried = lending if len(lending) else None

    def _lenders_for(self, images: Tensor) -> bool:
        return self.carried is not None and self.carried.shape[1:] == images.shape[1:]

    def _lending(self, labels: Tensor) -> Tensor:
        if self.lenders == "all":
            return torch.ones_like(labels, dtype=torch.bool)
        return labels < 0 if self.lenders == "unconfident" else labels >= 0

    def _watched_pass(self, images: Tensor) -> Pass:
        """Run the batch and remember its maps, each BatchNorm layer's statistics, and what the prefix gave."""
        with self.network.norm.using(Running()):
            replayed = self.replay.possible(images) and self.network.starts_anywhere
        with self.network.norm.recording() as statistics, self.replay.recording(images) as outputs:
            out = self.network.selecting(images, watch=self.layer)
        if out.maps is not None:
            self._first = _FirstPass(out.maps, Recall(statistics), outputs if replayed else None)
        return out

    def _styles(self, labels: Tensor, count: int) -> Statistics | None:
        """Draw a lender for each of `count` samples and return their styles, or None without any lender."""
        if self._first is None:
            return None
        if self.kind == "two_pass":
            lenders = self._lending(labels).nonzero().squeeze(1)
            if not len(lenders):
                return None
            drawn = lenders[self.random.integers(len(lenders), count)]
            maps = self._first.maps
        else:
            lenders = self.carried if self.carried is not None else labels[:0]
            picks = self.random.integers(len(lenders), count)
            used, drawn = picks.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            maps = self._maps_of(lenders[used], self._first)
        mean, deviation = style_statistics(self._styled_part(maps))
        return mean[drawn], deviation[drawn]

    @torch.no_grad()
    def _maps_of(self, images: Tensor, first: _FirstPass) -> Tensor:
        """Run images of the last batch up to the style layer, normalised as the batch at hand."""
        with self._as_in(first):
            return run_up_to(self.network.module, self.layer, images)

    def _second_pass(self, images: Tensor, chosen: Tensor, style: Statistics, first: _FirstPass) -> Tensor:
        """Return the features of the chosen images in the given styles."""
        change = self._on_patches(lambda maps: restyle(maps, *style))
        with self._as_in(first):
            if first.outputs is None:
                return self.network(images[chosen], at=self.layer, change=change).z
            with self.replay.starting_with(change(first.maps[chosen]), first.outputs):
                return self.network(images).z

    @contextmanager
    def _as_in(self, first: _FirstPass) -> Iterator[None]:
        """Normalise as in the first pass; under running statistics the rule in force does."""
        with self.network.norm.using(first.statistics if first.statistics.statistics else None):
            yield

    def _styled_part(self, maps: Tensor) -> Tensor:
        return maps[:, self.prefix :] if maps.ndim == 3 else maps

    def _on_patches(self, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Leave class and register tokens as they are."""

        def changed(maps: Tensor) -> Tensor:
            if maps.ndim == 4 or self.prefix == 0:
                return change(maps)
            return torch.cat([maps[:, : self.prefix], change(maps[:, self.prefix :])], dim=1)

        return changed
