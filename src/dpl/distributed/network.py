"""A network that is given whole batches and runs one part of each in each process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.team = Team.current()

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
        features = None if local.features is None else self._united(local.features, rows.count)
        return Pass(images, self._united(local.logits, rows.count), features)

    def _united(self, own: Tensor, count: int) -> Tensor:
        if own.requires_grad:
            own.register_hook(self._meet_at_end)
        return unite(own, self.team, count)

    def _on_whole(self, change: Callable[[Tensor], Tensor], rows: Rows) -> Callable[[Tensor], Tensor]:
        """Let `change` see the maps of the whole batch; it may return another number of rows."""

        def changed(maps: Tensor) -> Tensor:
            whole = change(unite(maps, self.team, rows.count))
            rows.count = len(whole)
            return part(whole, self.team)

        return changed

    def _meet_at_end(self, gradient: Tensor) -> Tensor:
        """Have the gradients averaged when this backward pass is over; several passes over the network meet once."""
        if not self._meeting:
            self._meeting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._meet)
        return gradient

    _meeting = False

    def _meet(self) -> None:
        self._meeting = False
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not gradients:
            return
        mean = self.team.add(torch.cat([gradient.flatten() for gradient in gradients])) / self.team.size
        for gradient, values in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
