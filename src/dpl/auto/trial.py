"""A candidate method on the shared network; its weights are saved while another candidate uses the network."""

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

__all__ = ["CANDIDATES", "TrialMethod"]

# The paper's two scopes, with information maximisation beside the prototypes: it balances the classes, so that a few
# confident samples do not bias the rest.
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("shot_im+dpl", {"scope": "all", "lr": 5e-5}),
    "affine": ("shot_im+dpl", {"scope": "affine", "lr": 1e-3}),
}


class TrialMethod(Stateful):
    """One candidate: its method, its weights, and its results on batches before it adapted to them."""

    rows: int
    regret: int  # millionths of estimated predictions lost against the unadapted model; below 0: won

    def __init__(self, network: Network, name: str) -> None:
        super().__init__()
        self.name = name
        self.method_name, self.values = CANDIDATES[name]
        kind: Any = get_method(self.method_name)
        self.method: GradientMethod[Any] = kind(
            network, make_settings(kind.settings_class, repr(self.method_name), self.values)
        )
        self.comparison, self.saved_weights = SourceComparison(GuardSettings()), SavedState()
        self.declare(rows=0, regret=0)
        self._fresh = self.method.state()
        for part in ("method", "comparison", "saved_weights"):
            self.declare_part(part, getattr(self, part))

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters that it trains, by name."""
        return self.method.trainable

    def restart(self, confidence: float) -> None:
        """Start over, with this confidence threshold."""
        self.method.restore(self._fresh)
        self.method.optimizer.restore({})
        self.comparison.restart()
        self.saved_weights.clear()
        self.rows = self.regret = 0
        self.set_confidence(confidence)

    def set_confidence(self, confidence: float) -> None:
        """Set the confidence threshold of the DPL term."""
        term: Any = self.method.terms[-1]
        term.settings = replace(term.settings, confidence=confidence)

    @torch.no_grad()
    def load(self) -> None:
        """Copy its weights into the network, which holds the source weights, and make them trainable."""
        self.set_trainable(True)
        saved = self.saved_weights.state()
        for name, parameter in self.parameters.items():
            if name in saved:
                parameter.copy_(saved[name])

    def unload(self) -> None:
        """Save its weights; the caller restores the source weights."""
        self.saved_weights.save({name: parameter.detach().clone() for name, parameter in self.parameters.items()})
        self.set_trainable(False)

    def set_trainable(self, trainable: bool) -> None:
        """Switch the gradients of its parameters on or off."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(trainable)

    def compare(self, unadapted: Tensor, logits: Tensor) -> ComparisonResult:
        """Compare its logits from before the update with those of the unadapted model."""
        signals = self.comparison.compare(unadapted, logits)
        self.rows += len(logits)
        self.regret += round(1e6 * signals.regret * len(logits))
        return signals

    @property
    def mean_regret(self) -> float:
        """Estimated share of predictions lost in the trial."""
        return 1e-6 * self.regret / max(self.rows, 1)

    def move(self, transfer: Callable[[Tensor], Tensor]) -> None:
        """Move the first state, too."""
        super().move(transfer)
        self._fresh = {k: transfer(v) if v.is_floating_point() else v for k, v in self._fresh.items()}
