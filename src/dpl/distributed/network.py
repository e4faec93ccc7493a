"""A network that is given whole batches and runs one part of each in each process."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from dpl.distributed.exchange import part, unite
from dpl.distributed.norm import Rows, pooled
from dpl.distributed.team import Team
from dpl.surgery import Network, Pass
from dpl.surgery.style import at_layer

__all__ = ["ParallelNetwork"]


class ParallelNetwork(Network):
    """Looks like the network of one process: whole batches in, logits and features of whole batches out.

    All that a method does with them (labels, losses, memories, random draws) happens in every process alike.
    """

    starts_anywhere = False  # each process has the maps of its own rows only

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.team = Team.current()
        self._handles: list[RemovableHandle] = []

    def __call__(
        self, images: Tensor, *, at: str | None = None, change: Callable[[Tensor], Tensor] | None = None
    ) -> Pass:
        """Run this process's rows; every process returns the pass of all rows."""
        rows = Rows(self.team, len(images), self.norm.rows)
        rule = pooled(self.norm.rule, rows) if self.norm.groups == 1 and len(images) >= self.team.size else None
        if rule is None:  # every process runs all of it
            return super().__call__(images, at=at, change=change)
        own = images[self.team.rows(len(images))]
        with self.norm.using(rule):
            if at is None or change is None:
                local = super().__call__(own)
            else:
                with at_layer(self.module, at, self._on_whole(change, rows)):
                    local = super().__call__(own)
        features = None if local.features is None else unite(local.features, self.team, rows.count)
        return Pass(images, unite(local.logits, self.team, rows.count), features)

    def _on_whole(self, change: Callable[[Tensor], Tensor], rows: Rows) -> Callable[[Tensor], Tensor]:
        """Let `change` see the maps of the whole batch; it may return another number of rows."""

        def changed(maps: Tensor) -> Tensor:
            whole = change(unite(maps, self.team, rows.count))
            rows.count = len(whole)
            return part(whole, self.team)

        return changed

    def train_only(self, scope: str, start: str | None = None) -> dict[str, Parameter]:
        """Make the parameters of `scope` trainable; their gradients are those of all processes from the start."""
        chosen = super().train_only(scope, start)
        for handle in self._handles:
            handle.remove()
        self._handles = [p.register_hook(self._mean) for p in chosen.values()]  # type: ignore[no-untyped-call]
        return chosen

    def differentiate(self, images: Tensor) -> None:
        """Run the batch for a clock, without the others: they may need another number of runs."""
        self._alone = True
        try:
            super().differentiate(images)
        finally:
            self._alone = False

    _alone = False

    def _mean(self, gradient: Tensor) -> Tensor:
        if self._alone:
            return gradient
        return (self.team.add(gradient) / self.team.size).view_as(gradient)
