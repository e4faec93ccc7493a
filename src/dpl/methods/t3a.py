"""T3A: classify by templates that follow the stream.

Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization, NeurIPS 2021.

    S_c = the K features of lowest entropy among the classifier's row and the samples predicted as c so far
    t_c = sum of s/|s| over S_c,     logit_c(x) = <z(x), t_c/|t_c|>

Updates: the support set; no weight changes and there is no backward pass. Needs: a linear classifier. Output: the
batch enters the support set first and is predicted then; logits have no bias and no temperature. `predict` scores with
the supports there are. BatchNorm uses the source's statistics.

The authors choose K among 1, 5, 20, 50, 100 and "all" on source validation data; the default is in the middle.
Departures: of equal entropies the older support stays (theirs: by chance), and with filter_k=-1 all are kept, up to
`capacity` in all so that an endless stream stays bounded. The authors' -1 is a slice that drops the worst support of
every class at each batch, so that a class may lose its only one and score 0 from then on; `authors=True` does the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpl.core.settings import setting
from dpl.methods.base import Method
from dpl.methods.parts.supports import SupportSet, SupportSettings
from dpl.methods.registry import register
from dpl.network import Network, Pass

__all__ = ["T3A", "T3ASettings"]


@dataclass(frozen=True, kw_only=True)
class T3ASettings(SupportSettings):
    """Settings of T3A."""

    authors: bool = setting(False, "with filter_k=-1, drop the worst support of every class at each batch, as theirs")


@register(
    "t3a",
    paper="Iwasawa and Matsuo, Test-Time Classifier Adjustment Module, NeurIPS 2021",
    updates="a support set of features; no weights",
    passes="1 forward",
    needs_classifier=True,
)
class T3A(Method[T3ASettings]):
    """Nearest template by inner product."""

    settings_class = T3ASettings
    supports: SupportSet

    def __init__(self, network: Network, settings: T3ASettings) -> None:
        super().__init__(network, settings)
        self.declare_part("supports", SupportSet(network, settings))

    @torch.no_grad()
    def step(self, images: Tensor) -> Tensor:
        """Add the batch to the supports, then predict it."""
        out = self.network(images)
        entered = self.supports.add(out)
        if self.settings.authors and self.settings.filter_k == -1:
            self.supports.drop_worst()
        self.facts = {"updated": entered.any(), "entered": entered.sum(), "supports": self.supports.size}
        return self._score(out)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict with the supports as they are."""
        return self._score(self.network(images))

    def exported_classifier(self) -> tuple[Tensor, Tensor | None]:
        """Return the normalised templates, which are a linear layer without a bias."""
        return self.supports.directions(), None

    def _score(self, out: Pass) -> Tensor:
        return self.supports.scores(out.z).to(out.logits.dtype)
