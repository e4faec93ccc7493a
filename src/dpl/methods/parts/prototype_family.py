"""What dpl_o, dpl_star, dpl and dpl_dagger share: confident samples alone take part, in new styles if asked."""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor

from dpl.core.random import Random
from dpl.core.settings import setting
from dpl.methods.base import Fact, GradientMethod, Objective, Term
from dpl.methods.parts.mixed_stream import MixedStream
from dpl.methods.parts.style_transfer import StyleTransfer
from dpl.methods.settings import GradientSettings, Settings
from dpl.network import Network, Pass
from dpl.objectives import classes_present, confident_labels

__all__ = ["MANY_CLASSES", "SAMPLED_CLASSES", "PrototypeMethod", "PrototypeSettings", "PrototypeTerm"]

# Above so many classes Eq. 6 is estimated from a random sample: all C² similarities would cost more than the network.
MANY_CLASSES, SAMPLED_CLASSES = 4096, 64


@dataclass(frozen=True, kw_only=True)
class PrototypeSettings(GradientSettings, lr=5e-5, scope="all"):
    """Settings of dpl_o, dpl_star, dpl and dpl_dagger."""

    confidence: float = setting(0.9, "alpha: samples with a probability above it take part", low=0, high=1)
    temperature: float = setting(0.1, "tau: temperature of the cosine similarities", low=1e-4)
    mixed_only: bool = setting(True, "learn only while the latest images are seen to be of several classes")
    style: Literal["off", "two_pass", "carry_over"] = setting(
        "off", "also show confident samples in the style of unconfident ones: of this batch, or of the last"
    )
    style_layer: str | None = setting(None, "module whose output is restyled; found when not given")
    style_from: Literal["unconfident", "all", "confident"] = setting("unconfident", "which samples lend their style")


P = TypeVar("P", bound=PrototypeSettings)


class PrototypeTerm(Term, Generic[P]):
    """A loss over the confident samples; `X+<member>` adds it to X."""

    def __init__(self, network: Network, settings: P, random: Random) -> None:
        super().__init__()
        self.network, self.settings, self.random = network, settings, random
        self.styling: StyleTransfer | None = None
        if settings.style != "off":
            carry = settings.style == "carry_over"
            self.declare_part(
                "styling", StyleTransfer(network, random, settings.style_layer, settings.style_from, carry=carry)
            )

    def candidates(self, out: Pass) -> Tensor:
        """Eq. 1: the confident samples."""
        return confident_labels(out.reference, self.settings.confidence) >= 0

    def __call__(self, out: Pass) -> Objective:
        """Return the loss over the confident samples; with one class alone there is nothing to contrast."""
        if self.styling is not None:
            out = self.styling.extend(out, self.settings.confidence)
        labels = confident_labels(out.reference, self.settings.confidence)  # -1: not confident
        present = classes_present(labels)
        facts: dict[str, Fact] = {"confident": out.share(labels >= 0), "classes": present}
        objective = self.loss(out, labels)
        reason = "fewer than two classes among the confident samples"
        return Objective(objective.value, present > 1, facts | objective.facts, reason)

    def loss(self, out: Pass, labels: Tensor) -> Objective:
        """Return the member's loss."""
        raise NotImplementedError


class PrototypeMethod(GradientMethod[P], Generic[P]):
    """What the family shares: only confident samples take part, and style transfer can be added."""

    settings_class: ClassVar[type[Settings]] = PrototypeSettings
    term_class: ClassVar[type[PrototypeTerm[Any]]]
    commits_last = True
    term: PrototypeTerm[P]

    def __init__(self, network: Network, settings: P) -> None:
        super().__init__(network, settings)
        self.declare_part("term", self.term_class(network, settings, self.random))
        self.candidates, self.loss = self.term.candidates, self.term  # type: ignore[method-assign]
        self.stream: MixedStream | None = None
        if settings.mixed_only and network.norm.layers and self.effective_batch is None:  # norm="auto" sees it itself
            self.declare_part("stream", MixedStream())

    def step(self, images: Tensor) -> Tensor:
        """Predict, then learn from what is confident if the latest images are of several classes."""
        if self.stream is None or self.stream.is_mixed(images):
            return super().step(images)
        self.facts = {"updated": False, "reason": "the latest images look like one class, or few"}
        return self.predict(images)
