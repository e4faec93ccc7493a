"""DPL-dagger: DPL that also sees its confident samples in the style of unconfident ones (Section III-B of the paper).

Wang, Ding, Tan, Tan, Decoupled Prototype Learning for Reliable Test-Time Adaptation, 2024.

    mu(F), sigma(F): mean and deviation of each channel over space, at the end of the first stage          (Eq. 8, 9)
    F^a -> sigma(F^b) (F^a - mu(F^a)) / sigma(F^a) + mu(F^b),   a confident, b drawn from the unconfident  (Eq. 10)

Everything else is dpl's. `style="two_pass"` draws b from the same batch; `style="carry_over"` draws it from the last
batch, the variant of the paper's discussion. BatchNorm statistics are those of the batch's own images, so predictions
are the ones of dpl. Without an unconfident sample the batch is treated as by dpl. On a CPU the confident samples alone
are restyled; elsewhere their number would have to be read, so all are, and the copies of the others get no label.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpl.core.errors import ModelError
from dpl.core.random import Random
from dpl.core.state import Stateful
from dpl.methods.dpl import DPL, DPLSettings, PrototypeMethod, PrototypeSettings
from dpl.methods.registry import register
from dpl.network import Network, Pass
from dpl.network.norm import RecordedStatistics, Rule, Statistics
from dpl.network.style_layer import at_layer, find_style_layer, prefix_tokens, run_up_to
from dpl.objectives import confident_labels, restyle, style_statistics

__all__ = ["DPLDagger", "DPLDaggerSettings", "StyleTransfer", "with_style"]


class StyleTransfer(Stateful):
    """Appends to a pass its confident samples in the style of others."""

    carried: Tensor | None  # images of the last batch that lend their style to the next
    carried_lends: Tensor | None  # which of them do, a mask; None: all

    def __init__(self, network: Network, settings: PrototypeSettings, random: Random) -> None:
        super().__init__()
        self.network, self.settings, self.random = network, settings, random
        self.layer = find_style_layer(network.module, settings.style_layer)
        self.prefix = prefix_tokens(network.module)  # class and register tokens have no style
        self.declare(carried=None, carried_lends=None)
        self._maps: Tensor | None = None
        self._statistics: Statistics = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the maps of the first pass inside the block, and the statistics that its BatchNorm layers used."""
        self._maps = None

        def keep(maps: Tensor) -> Tensor:
            self._maps = maps.detach() if self._maps is None else self._maps
            return maps

        with at_layer(self.network.module, self.layer, keep), self.network.norm.recording() as self._statistics:
            yield

    def extend(self, out: Pass) -> Pass:
        """Return the pass with restyled copies of its confident samples; each keeps its sample's label."""
        rows = self._rows_to_copy(out)
        lends = self._lends(out.whole) if self.settings.style == "two_pass" else self._carried_lends(out)
        if lends is None or len(rows) == 0 or (lends.device.type == "cpu" and not bool(lends.any())):
            return out
        chance = self.random.uniform(len(out.whole))  # for every image, so that all devices draw the same
        style = self._style_of(_pick(lends, chance[_batch_rows(out)[rows]]))
        change = at_layer(self.network.module, self.layer, lambda maps: self._restyled(maps, *style))
        with self.network.norm.using(self._rule()), change:
            copies = self.network(out.images[rows])
        labelled_by = torch.where(lends.any(), out.reference[rows], torch.nan)  # no lender: no label
        return replace(
            out,
            images=torch.cat([out.images, copies.images]),
            logits=torch.cat([out.logits, copies.logits]),
            features=torch.cat([out.z, copies.z]),
            reference=torch.cat([out.reference, labelled_by]),
        )

    def carry(self, images: Tensor, whole: Tensor) -> None:
        """Keep the images that lend their style to the next batch."""
        self._maps, self._statistics = None, {}
        if self.settings.style == "carry_over":
            lends, on_host = self._lends(whole), whole.device.type == "cpu"
            lent = images[lends] if on_host else images
            self.carried, self.carried_lends = (lent if len(lent) else None), (None if on_host else lends)

    def _rows_to_copy(self, out: Pass) -> Tensor:
        """Return the confident rows where it is cheap to know them, else all rows."""
        confident = confident_labels(out.reference, self.settings.confidence) >= 0
        if confident.device.type == "cpu":
            return confident.nonzero().flatten()
        return torch.arange(len(confident), device=confident.device)

    def _style_of(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations (Eq. 8, 9) of the drawn lenders."""
        maps = self._maps
        if self.settings.style == "carry_over" and self.carried is not None:
            lenders = self.carried
            if drawn.device.type == "cpu":  # run those only that were drawn
                used, drawn = drawn.unique(return_inverse=True)  # type: ignore[no-untyped-call]
                lenders = lenders[used]
            with torch.no_grad(), self.network.norm.using(self._rule()):
                maps = run_up_to(self.network.module, self.layer, lenders)
        if maps is None:
            raise ModelError(f"style_layer={self.layer!r} was not used in the forward pass; name another one")
        mean, deviation = style_statistics(self._patches(maps))
        return mean[drawn], deviation[drawn]

    def _carried_lends(self, out: Pass) -> Tensor | None:
        """Return which of the carried images lend their style; None if there are none of this size."""
        if self.carried is None or self.carried.shape[1:] != out.images.shape[1:]:
            return None
        if self.carried_lends is not None:
            return self.carried_lends
        return torch.ones(len(self.carried), dtype=torch.bool, device=self.carried.device)

    def _lends(self, whole: Tensor) -> Tensor:
        """Return which images of a batch lend their style, a mask [B]."""
        confident = confident_labels(whole, self.settings.confidence) >= 0
        return {"unconfident": ~confident, "all": confident | True, "confident": confident}[self.settings.style_from]

    def _rule(self) -> Rule | None:
        """Return the rule that normalises as the batch was; None where that is by running statistics."""
        return RecordedStatistics(self._statistics) if self._statistics else None

    def _patches(self, maps: Tensor) -> Tensor:
        return maps[:, self.prefix :] if maps.ndim == 3 else maps

    def _restyled(self, maps: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        patches = restyle(self._patches(maps), mean, deviation)  # Eq. 10
        return patches if maps.ndim == 4 else torch.cat([maps[:, : self.prefix], patches], dim=1)


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


K = TypeVar("K", bound=type[PrototypeMethod[Any]])


def with_style(kind: K) -> K:
    """Return a member of the family whose loss also sees restyled copies."""

    class Styled(kind):  # type: ignore[valid-type, misc]
        __doc__ = kind.__doc__
        styling: StyleTransfer

        def __init__(self, network: Network, settings: PrototypeSettings) -> None:
            super().__init__(network, settings)
            self.declare_part("styling", StyleTransfer(network, settings, self.random))

        def forward(self, images: Tensor) -> Pass:
            with self.styling.watching():
                out: Pass = super().forward(images)
            return self.styling.extend(out)

        def answer(self, images: Tensor, logits: Tensor) -> Tensor:
            self.styling.carry(images, logits)
            return super().answer(images, logits)  # type: ignore[no-any-return]

    return Styled  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class DPLDaggerSettings(DPLSettings, style="two_pass"):
    """Settings of DPL with style transfer."""


@register(
    "dpl_dagger",
    paper="Wang et al., Decoupled Prototype Learning, 2024 (Eq. 7 to 10)",
    updates="all parameters, class memory",
    passes="1 forward, 2 forward and 1 backward of the confident",
    needs_classifier=True,
)
class DPLDagger(DPL):
    """Eq. 7 with style transfer."""

    settings_class = DPLDaggerSettings
