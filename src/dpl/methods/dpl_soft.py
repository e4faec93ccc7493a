"""SOFT DPL: decoupled prototypes without a threshold, with the surest features as memory and answer.

Decoupled Prototype Learning (Wang et al., 2024) learns from samples above a confidence alpha. Where the source model is
unsure, hardly any sample is, and nothing is learned. Here every sample takes part, by its probabilities.

    R_ik = p_k(x_i), without gradient;   s_ik = <w_k, z_i>/tau (cosine);   pi_k = min(1, sum_i R_ik)
    L_SOFT = sum_k pi_k (log sum_i e^{s_ik} - log sum_i R_ik e^{s_ik}) / sum_k pi_k          instead of Eq. 4
    L_IM = mean_i H(p(x_i)) - H(mean_i p(x_i))                                               SHOT-IM's loss
    z*_k = mean direction of the 20 features of lowest entropy predicted as k (T3A's support set)  instead of Eq. 5
    L = L_SOFT + L_IM + beta L_REG(w, z*)                                                    Eq. 6 and 7 of the paper
    answer: logit_k(x) = (1 - m) (W z(x) + b)_k + m a <z(x), z*_k>,   m = n_e / 2n
            a: so that the memory's logits of a batch spread as the classifier's do; n_e: of norm="auto", else n

Updates: all parameters, once for each batch, and the support set. Statistics: norm="auto", the share of batch
statistics that the effective size of the batch and the size of the shift allow; a network without BatchNorm goes
without. Needs: a linear classifier. Output: the batch enters the support set first and is predicted then, with the
weights from before the update. A batch of one has no contrast and changes no weight.

Every part is a setting: `norm`, `loss`, `reg_weight`, `answer`, `filter_k`, `scope`, `lr`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpl.core.random import Random
from dpl.core.settings import setting
from dpl.methods.base import Fact, GradientMethod, Objective, Term
from dpl.methods.parts.prototype_family import MANY_CLASSES, SAMPLED_CLASSES
from dpl.methods.parts.scaled_answer import Answer, AnsweredBySupports
from dpl.methods.parts.supports import SupportSet, SupportSettings
from dpl.methods.registry import register
from dpl.methods.settings import GradientSettings
from dpl.network import Network, Pass
from dpl.objectives import confident_labels, dpl_soft, dpl_star, entropy, marginal_entropy, prototype_regularization

__all__ = ["DPLSoft", "DPLSoftSettings", "DPLSoftTerm"]


@dataclass(frozen=True, kw_only=True)
class DPLSoftSettings(GradientSettings, SupportSettings, norm="auto", lr=5e-5, scope="all"):
    """Settings of soft DPL."""

    loss: Literal["soft", "information", "soft+information", "star", "entropy", "none"] = setting(
        "soft+information",
        "what is minimised: soft DPL, SHOT-IM's loss or their sum, Eq. 4 over samples above `confidence`, TENT's loss, "
        "or nothing",
    )
    confidence: float = setting(0.9, "alpha, for loss='star' alone", low=0, high=1)
    temperature: float = setting(0.1, "tau: temperature of the cosine similarities", low=1e-4)
    reg_weight: float = setting(1.0, "beta: weight of the regulariser", low=0)
    answer: Answer = setting("both", "what predicts: the memory, the classifier, or both together")


# Each loss without the regulariser, of a pass and the prototypes.
_LOSSES: dict[str, Callable[[Pass, Tensor, DPLSoftSettings], Tensor]] = {
    "soft": lambda out, w, s: dpl_soft(out.z, w, out.probabilities, s.temperature),
    "star": lambda out, w, s: dpl_star(out.z, w, confident_labels(out.reference, s.confidence), s.temperature),
    "information": lambda out, _w, _s: entropy(out.logits).mean() - marginal_entropy(out.logits),
    "soft+information": lambda out, w, s: _LOSSES["soft"](out, w, s) + _LOSSES["information"](out, w, s),
    "entropy": lambda out, _w, _s: entropy(out.logits).mean(),
    "none": lambda out, _w, _s: out.z.new_zeros(()),
}


class DPLSoftTerm(Term):
    """The loss with its support set; also what `X+dpl_soft` adds to X."""

    supports: SupportSet

    def __init__(self, network: Network, settings: DPLSoftSettings, random: Random) -> None:
        super().__init__()
        self.network, self.settings, self.random = network, settings, random
        self.declare_part("supports", SupportSet(network, settings))

    def __call__(self, out: Pass) -> Objective:
        """Let the batch enter the support set, and return the loss."""
        self.supports.add(out)
        return self.objective(out)

    def objective(self, out: Pass) -> Objective:
        """Return the loss with the supports as they are."""
        s, w = self.settings, self.network.prototypes
        contrast = _LOSSES[s.loss](out, w, s)
        enough = torch.full((), len(out.logits) > 1, device=contrast.device)
        if s.reg_weight == 0:
            return Objective(contrast, enough)
        some = self.random.integers(len(w), SAMPLED_CLASSES) if len(w) > MANY_CLASSES else None
        regulariser = prototype_regularization(w, self.supports.sums, s.temperature, some)  # Eq. 6
        facts: dict[str, Fact] = {"contrast": contrast.detach(), "regulariser": regulariser.detach()}
        return Objective(contrast + s.reg_weight * regulariser, enough, facts)  # Eq. 7

    def restart(self) -> None:
        """Start the support set from the classifier's rows again."""
        self.supports.restart()


@register(
    "dpl_soft",
    paper="this library; docs/dpl-soft.md",
    updates="all parameters, a support set of features",
    passes="1 forward, 1 backward; 1 forward of 16 images",
    needs_classifier=True,
    host_reads=1,  # norm="auto", until samples of a batch are first seen to be correlated
)
class DPLSoft(AnsweredBySupports, GradientMethod[DPLSoftSettings]):
    """Soft DPL."""

    settings_class = DPLSoftSettings
    commits_last = True
    term_class = DPLSoftTerm  # what `X+dpl_soft` adds to X
    term: DPLSoftTerm

    def __init__(self, network: Network, settings: DPLSoftSettings) -> None:
        super().__init__(network, settings)
        self.declare_part("term", self.term_class(network, settings, self.random))
        self.declare_answer(network, self.term.supports, settings.answer)

    def step(self, images: Tensor) -> Tensor:
        """Let the batch enter the support set, predict it, then update, `steps` times."""
        learning = self.settings.loss != "none"
        for step in range(self.settings.steps if learning else 1):
            with torch.set_grad_enabled(learning):
                out = self.forward(images)
                if step == 0:
                    logits = self.enter(out)
                if learning:
                    self.update(self.term.objective(out), out)
        if not learning:
            self.facts = {"updated": True, "supports": self.term.supports.size}
        return self.answer(images, logits)
