"""`norm="auto"`: the share of batch statistics in BatchNorm, chosen from the stream without a label.

Every candidate share predicts the first few batches (a look); then one batch now and then; and again a few when the
images look different from those before (parts.stream_signals). In between, a few rows are shown to the source's
statistics (a glance): if neighbours turn out to share their class (parts.stream_order), the choice is judged
anew. What is kept over batches, and how it is judged, is parts.blend_evidence. All of it is declared state of the
method, so reset, snapshots and roll-backs hold it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dpl.core.state import Stateful
from dpl.methods.parts.blend_evidence import SHARES, BlendEvidence, Verdict
from dpl.methods.parts.stream_order import StreamOrder
from dpl.methods.parts.stream_signals import StreamSignals
from dpl.network import Network
from dpl.network.norm import Chosen, blend

__all__ = ["NormChoice"]

_FEWEST, _MOST = 3, 8  # batches looked at before the choice is settled ...
_ROWS = 128  # ... and the rows that are enough in between
_SELDOM = 48  # batches between two looks afterwards
_GLANCE = 4  # batches between two glances; half as many while the stream is young
_YOUNG = 16  # batches
_GLANCED = 16  # rows of a glance, or a quarter of the batch
_FADE = 0.5  # what a later look leaves of the earlier evidence


class NormChoice(Stateful):
    """Looks at batches before the method does, and sets the share that the network's layers follow."""

    batches: int
    looks: int  # batches looked at since the last (re)start
    rows: int  # rows of those
    waited: int  # batches since the last look
    settled: int
    chosen: int  # index into SHARES
    changes: int  # how often the stream looked different from before
    born: int  # batches seen before the last change
    doubting: int  # whether a gain was not believed because the stream is young

    def __init__(self, network: Network, rule: Chosen) -> None:
        super().__init__()
        self.network, self.rule = network, rule
        self.verdict: Verdict | None = None
        self.evidence, self.signals, self.order = BlendEvidence(), StreamSignals(), StreamOrder()
        self.declare(batches=0, looks=0, rows=0, waited=0, settled=0, chosen=0, changes=0, born=0, doubting=0)
        for name in ("evidence", "signals", "order"):
            self.declare_part(name, getattr(self, name))

    @property
    def share(self) -> float:
        """The batch's share in the statistics."""
        return SHARES[self.chosen]

    def prepare(self, images: Tensor) -> None:
        """Before a batch is met: look or glance at it if it is time, and choose."""
        self.batches += 1
        self.waited += 1
        if self.signals.changed(images):
            self.looks = self.rows = self.settled = 0
            self.changes, self.born = self.changes + 1, self.batches
            self.evidence.fade(0.0)
            self.order.forget()
        if not self.settled or self.waited >= _SELDOM:
            self._look(images)
        elif self.batches % (_GLANCE // 2 if self.young else _GLANCE) == 0:
            self._glance(images[: max(_GLANCED, len(images) // 4)])

    def _look(self, images: Tensor) -> None:
        """Let every candidate predict the batch, and choose."""
        if self.settled:
            self.evidence.fade(_FADE)
        logits = self.candidates(images)
        self.evidence.add(logits)
        self.order.add(logits[0])
        self.looks, self.rows, self.waited = self.looks + 1, self.rows + len(images), 0
        self.settled = int(self.looks >= _MOST or (self.looks >= _FEWEST and self.rows >= _ROWS))
        self._judge()

    @torch.no_grad()
    def _glance(self, images: Tensor) -> None:
        """Let the source's statistics predict some rows; if the stream turns out to be sorted, judge anew."""
        with self.network.norm.using(blend(0.0)):
            self.order.add(self.network(images).logits)
        believed = bool(self.doubting) and not self.young
        if (self.chosen and not self.mixed) or believed:
            self._judge()

    def _judge(self) -> None:
        self.verdict = self.evidence.judge(self.mixed, self.young)
        self.doubting = int(self.verdict.doubted)
        self._follow(self.verdict.chosen)

    @property
    def mixed(self) -> bool:
        """Say whether the rows of a batch are no more alike than any two rows; reads on the host."""
        return self.order.mixed(self.young)

    @property
    def young(self) -> bool:
        """Say whether only a few batches were seen since the stream began or changed."""
        return self.batches - self.born < _YOUNG

    @torch.no_grad()
    def candidates(self, images: Tensor) -> Tensor:
        """Return the logits of every candidate share [A, B, C]."""
        logits = []
        for share in SHARES:
            with self.network.norm.using(blend(share)):
                logits.append(self.network(images).logits)
        return torch.stack(logits)

    def _follow(self, chosen: int) -> None:
        self.chosen = chosen
        self.rule.share = self.share

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Bring the choice back, for the layers too."""
        super().restore(state)
        self._follow(self.chosen)
