"""A forward pass for a loss that may select samples: only those it selects are differentiated.

Which samples a loss learns from is known after the forward pass. Where those are few, the pass is repeated for them
alone when the gradient arrives, and costs next to nothing: its convolutions and linear layers answer with what they
gave the first time, and so does every part that comes before what learns.
What is differentiated then is a batch of the selected samples, in every layer, and the graph of the first pass is let
go before. Where nearly all samples are selected, the first pass is differentiated as always. Gradients are the same
within rounding.

This needs a network that treats each sample by itself; whether it does is tried once for each shape of images. With
statistics of the batch it does not, and nothing of this is done.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpl.network.replay import answering, hooked
from dpl.network.rows import Convolutions, Kept, take_rows, unchanged

if TYPE_CHECKING:
    from dpl.network.network import Pass

__all__ = ["Selecting", "repeats_cheaply"]

_WORTH = 0.85  # share of samples with a gradient above which the first pass is differentiated
_LITTLE = 0.05  # share of the work in layers that learn, below which there is nothing to save
Run = Callable[[Tensor], "Pass"]


def repeats_cheaply(module: nn.Module) -> bool:
    """Say whether layers that a repeated pass saves, convolutions and linear ones, hold most of the weights."""
    saved = {p for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear) for p in layer.parameters()}
    return sum(p.numel() for p in saved) > sum(p.numel() for p in module.parameters()) / 2


class Selecting:
    """Passes of one network of which only selected samples are differentiated."""

    def __init__(self, module: nn.Module, convolutions: Convolutions) -> None:
        self._module, self._convolutions = module, convolutions
        self._beginnings: dict[tuple[int, ...], list[nn.Module]] = {}  # by the addresses of the parameters that learn
        self._apart: dict[torch.Size, bool] = {}  # whether samples of this shape are treated each by itself

    def __call__(self, run: Run, images: Tensor, parameters: list[Tensor]) -> "Pass":
        """Run the network; the gradient of its outputs reaches `parameters` through what the loss selects."""
        shared, beginning = self._convolutions, self._beginning(parameters)
        shared.kept, shared.samples, shared.work = {}, len(images), [0, 0]
        try:
            with _keeping(beginning, len(images)) as given:
                out, kept = run(images), shared.kept
        finally:
            shared.kept = None
        little = shared.work[1] <= _LITTLE * sum(shared.work)
        if little or not out.logits.requires_grad or not self._treats_samples_apart(run, images):
            return out
        outputs = [None if value is None else value.detach() for value in _outputs(out)]
        learnt = [value is not None and value.requires_grad for value in _outputs(out)]
        record = _Record(out, learnt, images, kept, given, run, shared)
        return type(out)(images, *_Selected.apply(record, *outputs, *parameters))  # type: ignore[no-untyped-call]

    def _beginning(self, parameters: list[Tensor]) -> list[nn.Module]:
        """Return the outermost modules that are defined before the first one that learns."""
        key = tuple(map(id, parameters))
        if key not in self._beginnings:
            self._beginnings[key] = []
            _collect_until_one_learns(self._module, self._beginnings[key])
        return self._beginnings[key]

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
    learnt: list[bool]  # which of its outputs depend on what learns
    images: Tensor
    kept: Kept  # outputs of convolutions and linear layers,
    given: Kept  # and of the parts before what learns
    run: Run
    shared: Convolutions

    def give(self, rows: Tensor, all_wanted: bool) -> "Pass":
        """Return the pass for some samples: the first one if all are wanted and it is still there, or a new one."""
        first, self.first = self.first, None
        if first is not None and all_wanted:
            self.kept, self.given = {}, {}
            return first
        del first  # its graph's memory is free for the new one
        self.shared.answers = {layer: list(outputs) for layer, outputs in self.kept.items()}
        self.shared.rows = rows
        try:
            with _giving(self.given, rows):
                return self.run(self.images[rows])
        finally:
            self.shared.answers = self.shared.rows = None


def _collect_until_one_learns(module: nn.Module, found: list[nn.Module]) -> bool:
    """Collect the outermost modules before the first one that learns; return whether that one was met."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        found.append(module)
        return False
    learns = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return learns or any(_collect_until_one_learns(child, found) for child in module.children())


@contextmanager
def _keeping(modules: list[nn.Module], samples: int) -> Iterator[Kept]:
    """Keep what these modules give inside the block, where it has a row for each sample and no graph."""
    kept: Kept = {}

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        whole = isinstance(output, Tensor) and output.ndim > 1 and len(output) == samples and not output.requires_grad
        kept.setdefault(module, []).append((output.detach(), output._version) if whole else None)

    with hooked(modules, keep):
        yield kept


@contextmanager
def _giving(kept: Kept, rows: Tensor) -> Iterator[None]:
    """Let modules answer with some rows of what they gave, if all of it was kept and nothing has overwritten it."""
    with ExitStack() as stack:
        for module, outputs in kept.items():
            given = [output for output in map(unchanged, outputs) if output is not None]
            if len(given) == len(outputs):
                stack.enter_context(answering(module, (take_rows(output, rows) for output in given)))
        yield


class _Selected(torch.autograd.Function):
    """The outputs of a pass; their gradient goes through those samples that have one."""

    @staticmethod
    def forward(
        ctx: Any, record: _Record, logits: Tensor, features: Tensor | None, maps: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.record, ctx.parameters = record, parameters
        given = [None if value is None else value.clone() for value in (logits, features, maps)]
        fixed = [value for value, learnt in zip(given, record.learnt, strict=True) if value is not None and not learnt]
        ctx.mark_non_differentiable(*fixed)
        return tuple(given)

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
