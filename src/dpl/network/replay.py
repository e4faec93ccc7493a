"""Run a network again from one of its layers on, without computing what lies before that layer a second time.

A first pass keeps the outputs of the modules that finish before the layer does. In a second one those modules answer
with what they gave before, the layer answers with changed maps, and everything behind it runs as usual; gradients
flow into whatever those maps were made of. Whether a network can be run so (no connection leads around the layer,
nothing is overwritten in place) is tried once, on three images, for each image shape.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpl.network.split import logits_of

__all__ = ["Replay", "answering", "hooked", "maps_in", "put_maps"]

Outputs = dict[nn.Module, list[Any]]
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


class Replay:
    """Runs of one network that start at one of its layers."""

    def __init__(self, module: nn.Module, layer: str) -> None:
        self.module, self.layer = module, module.get_submodule(layer)
        self._plans: dict[torch.Size, Counter[nn.Module] | None] = {}

    def possible(self, images: Tensor) -> bool:
        """Say whether images of this shape can be run again from the layer on; tried once for each shape."""
        shape = images.shape[1:]
        if shape not in self._plans:
            self._plans[shape] = self._try(images)
        return self._plans[shape] is not None

    @contextmanager
    def recording(self, images: Tensor) -> Iterator[Outputs]:
        """Keep what the modules up to the layer give inside the block."""
        plan = self._plans[images.shape[1:]]
        outputs: Outputs = {module: [] for module in plan or ()}

        def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
            if plan is not None and len(outputs[module]) < plan[module]:
                outputs[module].append(_without_graph(output))

        with hooked(outputs, keep):
            yield outputs

    @contextmanager
    def starting_with(self, maps: Tensor, outputs: Outputs) -> Iterator[None]:
        """Let a run inside the block start at the layer, with `maps` as its output."""
        answers = outputs | {self.layer: [put_maps(outputs[self.layer][0], maps)]}
        with ExitStack() as stack:
            for module, given in answers.items():
                stack.enter_context(answering(module, given))
            yield

    @torch.no_grad()
    def _try(self, images: Tensor) -> "Counter[nn.Module] | None":
        first, shape = images[:1], images.shape[1:]
        three = torch.cat([first, first.flip(-1), first / 2])
        try:
            self._plans[shape] = self._modules_up_to_layer(three)
            return self._plans[shape] if self._same_when_replayed(three) else None
        except _REFUSALS:
            return None

    def _same_when_replayed(self, three: Tensor) -> bool:
        """Compare a replay with the long way, for two of three images and with changed maps."""
        versions: list[int] = []
        with (
            self.recording(three) as outputs,
            hooked([self.layer], lambda *call: versions.append(maps_in(call[2])._version)),
        ):
            self.module(three)
        maps = maps_in(outputs[self.layer][0])
        if versions != [maps._version]:  # called more than once, or overwritten by what follows
            return False
        rows = torch.tensor([2, 0], device=three.device)
        changed = 0.9 * maps[rows] + 0.1
        before = [tensor._version for tensor in _tensors(outputs)]
        with self.starting_with(changed.clone(), outputs):
            short = logits_of(self.module(three))
        with hooked([self.layer], lambda *call: put_maps(call[2], changed.clone())):
            long = logits_of(self.module(three[rows]))
        untouched = before == [tensor._version for tensor in _tensors(outputs)]
        return untouched and short.shape == long.shape and torch.allclose(short, long, rtol=1e-3, atol=1e-4)

    def _modules_up_to_layer(self, images: Tensor) -> "Counter[nn.Module]":
        """Return the outermost modules that finish before the layer does, with the layer, and how often they ran."""
        finished: list[nn.Module] = []
        entered: list[int] = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            entered.append(len(finished))

        def leave(module: nn.Module, _inputs: Any, _output: Any) -> None:
            start = entered.pop()
            if self.layer not in finished:
                finished[start:] = [module]  # what ran inside it needs no answer of its own

        modules = list(self.module.modules())
        handles = [module.register_forward_pre_hook(enter) for module in modules]
        try:
            with hooked(modules, leave):
                self.module(images)
        finally:
            for handle in handles:
                handle.remove()
        return Counter(finished)


def maps_in(output: Any) -> Tensor:
    """Return the maps in a layer's output: the output, or the first of several."""
    maps: Tensor = output[0] if isinstance(output, tuple) else output
    return maps


def put_maps(output: Any, maps: Tensor) -> Any:
    """Return a layer's output with other maps."""
    return (maps, *output[1:]) if isinstance(output, tuple) else maps


def _without_graph(output: Any) -> Any:
    """Return an output that holds no graph: only a layer's maps are differentiated, and those are given anew."""
    if isinstance(output, tuple):
        return tuple(_without_graph(value) for value in output)
    return output.detach() if isinstance(output, Tensor) else output


@contextmanager
def hooked(modules: Any, hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook` after each forward call of these modules inside the block."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def answering(module: nn.Module, answers: Iterable[Any]) -> Iterator[None]:
    """Let a module answer its next calls with what is given, and run again after that."""
    waiting, forward = iter(answers), module.forward

    def answer(*args: Any, **kwargs: Any) -> Any:
        for given in waiting:
            return given
        return forward(*args, **kwargs)

    before = vars(module).get("forward")
    vars(module)["forward"] = answer
    try:
        yield
    finally:
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before


def _tensors(outputs: Outputs) -> list[Tensor]:
    return [value for given in outputs.values() for value in given if isinstance(value, Tensor)]
