"""A forward pass for a loss that may select samples: only those it selects are differentiated.

Which samples a loss learns from is known after the forward pass. Where those are few, the pass is repeated for them
alone when the gradient arrives, and costs next to nothing: its convolutions and linear layers answer with what they
gave the first time.
What is differentiated then is a batch of the selected samples, in every layer, and the graph of the first pass is let
go before. Where nearly all samples are selected, the first pass is differentiated as always. Gradients are the same
within rounding.

This needs a network that treats each sample by itself; whether it does is tried once for each shape of images. With
statistics of the batch it does not, and nothing of this is done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpl.surgery.rows import Convolutions, Kept

if TYPE_CHECKING:
    from dpl.surgery.network import Pass

__all__ = ["Selecting", "repeats_cheaply"]

_WORTH = 0.85  # share of samples with a gradient above which the first pass is differentiated
_FROZEN = 0.2  # share of the work before the first layer that learns, above which a repetition would cost too much
Run = Callable[[Tensor], "Pass"]


def repeats_cheaply(module: nn.Module) -> bool:
    """Say whether layers that a repeated pass saves, convolutions and linear ones, hold most of the weights."""
    saved = {p for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear) for p in layer.parameters()}
    return sum(p.numel() for p in saved) > sum(p.numel() for p in module.parameters()) / 2


class Selecting:
    """Passes of one network of which only selected samples are differentiated."""

    def __init__(self, convolutions: Convolutions) -> None:
        self._convolutions = convolutions
        self._apart: dict[torch.Size, bool] = {}  # whether samples of this shape are treated each by itself

    def __call__(self, run: Run, images: Tensor, parameters: list[Tensor]) -> "Pass":
        """Run the network; the gradient of its outputs reaches `parameters` through what the loss selects."""
        shared = self._convolutions
        shared.kept, shared.samples, shared.work = {}, len(images), [0, 0]
        try:
            out, kept = run(images), shared.kept
        finally:
            shared.kept = None
        late = shared.work[0] >= _FROZEN * sum(shared.work)  # or nothing was worth keeping
        if late or not out.logits.requires_grad or not self._treats_samples_apart(run, images):
            return out
        outputs = [None if value is None else value.detach() for value in _outputs(out)]
        record = _Record(out, images, kept, run, shared)
        return type(out)(images, *_Selected.apply(record, *outputs, *parameters))  # type: ignore[no-untyped-call]

    def _treats_samples_apart(self, run: Run, images: Tensor) -> bool:
        shape = images.shape[1:]
        if shape not in self._apart:
            with torch.no_grad():
                three = torch.cat([images[:1], images[:1].flip(-1), images[:1] / 2])
                together, alone = run(three).logits[[2, 0]], run(three[[2, 0]]).logits
            self._apart[shape] = torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
        return self._apart[shape]


@dataclass
class _Record:
    """A pass that was run, and what is needed to run it again for some of its samples."""

    first: "Pass | None"  # with its graph, until that has been used or was not wanted
    images: Tensor
    kept: Kept
    run: Run
    shared: Convolutions

    def give(self, rows: Tensor, all_wanted: bool) -> "Pass":
        """Return the pass for some samples: the first one if all are wanted and it is still there, or a new one."""
        first, self.first = self.first, None
        if first is not None and all_wanted:
            self.kept = {}
            return first
        del first  # its graph's memory is free for the new one
        kept = [output for outputs in self.kept.values() for output in outputs if output is not None]
        if all(given._version == version for given, version in kept):  # else something works in place
            self.shared.answers = {layer: list(outputs) for layer, outputs in self.kept.items()}
            self.shared.rows = rows
        try:
            return self.run(self.images[rows])
        finally:
            self.shared.answers = self.shared.rows = None


class _Selected(torch.autograd.Function):
    """The outputs of a pass; their gradient goes through those samples that have one."""

    @staticmethod
    def forward(
        ctx: Any, record: _Record, logits: Tensor, features: Tensor | None, maps: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.record, ctx.parameters = record, parameters
        return tuple(None if value is None else value.clone() for value in (logits, features, maps))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        alive = [(gradient.flatten(1) != 0).any(dim=1) for gradient in grads if gradient is not None]
        nothing = (None, None, None, None)
        if not alive:
            return *nothing, *(None for _ in ctx.parameters)
        rows = torch.stack(alive).any(dim=0).nonzero()[:, 0]
        rows = rows if len(rows) else rows.new_zeros(1)  # optimizers tell a gradient of zeros from none
        again = torch.is_grad_enabled()  # a second derivative is wanted
        if again or len(rows) > _WORTH * len(alive[0]):
            rows = torch.arange(len(alive[0]))
        with torch.enable_grad():
            out = ctx.record.give(rows, len(rows) == len(alive[0]))
        pairs = [(o, g[rows]) for o, g in zip(_outputs(out), grads, strict=True) if g is not None]
        outputs, directions = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, ctx.parameters, directions, allow_unused=True, create_graph=again)
        return *nothing, *found


def _outputs(out: "Pass") -> tuple[Tensor | None, ...]:
    return out.logits, out.features, out.maps
