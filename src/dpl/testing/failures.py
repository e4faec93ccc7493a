"""A call that fails changes nothing: an exception is raised at one torch operation after the other.

`FailAt` counts the operations of a block and raises at the k-th. `first_change` runs a step for many k and compares
the model's whole state, before and after: weights, optimizer, memory, generator, guard, counters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpl.model.adaptive import AdaptiveModel
from dpl.testing.checks import changed_keys

__all__ = ["FailAt", "Injected", "count_operations", "first_change"]


class Injected(Exception):  # noqa: N818 - stands for any exception
    """The exception that is raised on purpose."""


class FailAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at the operation of the given number (0: never); `seen` counts them."""

    def __init__(self, number: int = 0, error: type[BaseException] = Injected) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number, self.error, self.seen = number, error, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count, and fail once."""
        self.seen += 1
        if self.seen == self.number:
            raise self.error(f"at operation {self.number}, {func}")
        return func(*args, **(kwargs or {}))


def count_operations(model: AdaptiveModel, images: Tensor) -> int:
    """Return how many torch operations a step takes; the model is as before."""
    before = model.state_dict()
    mode = FailAt()
    with mode:
        model(images)
    model.load_state_dict(before)
    return int(mode.seen)


def first_change(model: AdaptiveModel, images: Tensor, points: Sequence[int]) -> str | None:
    """Fail at each of these operations; return what the first failure changed, or None."""
    images.grad = None
    before, last = model.state_dict(), dict(model.last)
    for number in points:
        try:
            with FailAt(number):
                model(images)
        except Injected:
            changed = changed_keys(before, model.state_dict())
            if changed or dict(model.last) != last or images.grad is not None:
                return f"operation {number}: {changed or 'model.last or images.grad'}"
        else:
            return f"operation {number}: the exception was swallowed"
    return None
