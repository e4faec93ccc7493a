"""A candidate that learns: a method on the shared network, whose weights are set aside while another one uses it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dpl.core.settings import make_settings
from dpl.core.state import Stateful
from dpl.guard.comparison import ComparisonResult, SourceComparison
from dpl.guard.settings import GuardSettings
from dpl.guard.state_copy import SavedState
from dpl.methods.base import GradientMethod
from dpl.methods.registry import get_method
from dpl.network import Network

__all__ = ["CANDIDATES", "Learner"]

# What may be tried on a stream worth learning from: the paper's two ways, with information maximisation beside the
# prototypes (a balance of classes that keeps few confident samples from tilting the rest).
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("shot_im+dpl", {"scope": "all", "lr": 5e-5}),
    "affine": ("shot_im+dpl", {"scope": "affine", "lr": 1e-3}),
}


class Learner(Stateful):
    """One candidate: its method, what it has learnt so far, and how it did on batches before it had seen them."""

    rows: int
    regret: int  # millionths of estimated answers lost against the model that does not learn; below 0: won

    def __init__(self, network: Network, name: str) -> None:
        super().__init__()
        self.name = name
        self.method_name, self.values = CANDIDATES[name]
        kind: Any = get_method(self.method_name)
        self.method: GradientMethod[Any] = kind(
            network, make_settings(kind.settings_class, repr(self.method_name), self.values)
        )
        self.comparison, self.kept = SourceComparison(GuardSettings()), SavedState()
        self.declare(rows=0, regret=0)
        self._fresh = self.method.state()
        for part in ("method", "comparison", "kept"):
            self.declare_part(part, getattr(self, part))

    @property
    def parameters(self) -> dict[str, Parameter]:
        """What it trains, by name."""
        return self.method.trainable

    def restart(self, confidence: float) -> None:
        """Forget everything, and learn from answers above this confidence."""
        self.method.restore(self._fresh)
        self.method.optimizer.restore({})
        self.comparison.restart()
        self.kept.clear()
        self.rows = self.regret = 0
        self.set_confidence(confidence)

    def set_confidence(self, confidence: float) -> None:
        """Learn prototypes from answers above this confidence."""
        term: Any = self.method.terms[-1]
        term.settings = replace(term.settings, confidence=confidence)

    @torch.no_grad()
    def enter(self) -> None:
        """Put its weights into the network (which holds the source's) and let gradients reach them."""
        self.allow(True)
        kept = self.kept.state()
        for name, parameter in self.parameters.items():
            if name in kept:
                parameter.copy_(kept[name])

    def leave(self) -> None:
        """Set its weights aside."""
        self.kept.save({name: parameter.detach().clone() for name, parameter in self.parameters.items()})
        self.allow(False)

    def allow(self, learning: bool) -> None:
        """Let gradients reach what it trains, or not."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(learning)

    def judge(self, still: Tensor, logits: Tensor) -> ComparisonResult:
        """Compare its answers to a batch it has not learnt from with those of the model that does not learn."""
        signals = self.comparison.compare(still, logits)
        self.rows += len(logits)
        self.regret += round(1e6 * signals.regret * len(logits))
        return signals

    @property
    def mean_regret(self) -> float:
        """Estimated share of answers lost in the trial."""
        return 1e-6 * self.regret / max(self.rows, 1)

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Take the first state along."""
        super().move(transfer)
        self._fresh = {k: transfer(v) if v.is_floating_point() else v for k, v in self._fresh.items()}
