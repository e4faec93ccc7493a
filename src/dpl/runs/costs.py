"""What adaptation costs: arithmetic counted operator by operator, the most memory held at once, and on what it ran."""

import contextlib
import math
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import dpl
from dpl.core.errors import SettingError
from dpl.model.adaptive import AdaptiveModel

__all__ = ["SAMPLE_EVERY", "Pace", "Work", "environment", "forget_peak", "peak_memory"]

SAMPLE_EVERY = 8  # batches: counting one in eight costs nothing that a clock could show


class Work:
    """Multiplications and additions per image, forward and backward, from a sample of the batches."""

    def __init__(self) -> None:
        self._batches = self._images = self._flops = 0

    @property
    def gflops_per_image(self) -> float | None:
        """Billions of floating-point operations for one image; None before the second batch."""
        return self._flops / self._images / 1e9 if self._images else None

    @contextlib.contextmanager
    def counted(self, images: int) -> Iterator[None]:
        """Count what is computed inside, if it is this batch's turn."""
        self._batches += 1
        if self._batches % SAMPLE_EVERY != 2:  # never the first: a model may look at one image beforehand
            yield
            return
        with _Counter() as counter:
            yield
        self._images += images
        self._flops += counter.flops


class Pace:
    """The time-constrained protocol: the stream goes on while the model adapts (Alfarra et al., ICML 2024).

    A step that costs c predictions lets c * speed - 1 batches pass, which are predicted only (docs/protocols.md).
    """

    def __init__(self, speed: float) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise SettingError(f"stream_speed={speed!r}: expected a positive number; 1 is the speed of a prediction")
        self.speed = speed
        self._prediction: float | None = None  # operations for one image
        self._blocked = 0  # batches until the model can adapt again
        self.missed = False  # whether the last batch was only predicted

    def run(self, model: AdaptiveModel, images: torch.Tensor) -> torch.Tensor:
        """Adapt to a batch if there is time; otherwise only predict it."""
        self.missed = self._blocked > 0
        if self.missed:
            self._blocked -= 1
            return model.predict(images)
        if self._prediction is None:
            with _Counter() as counter:
                model.predict(images)
            self._prediction = max(counter.flops / len(images), 1.0)
        with _Counter() as counter:
            logits: torch.Tensor = model(images)
        cost = counter.flops / len(images) / self._prediction
        self._blocked = max(round(cost * self.speed), 1) - 1
        return logits


def _backward(
    gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, *rest: Any, out_val: Any = None
) -> int:
    """Count a convolution's backward pass; torch's formula ignores groups, far too high for depthwise layers."""
    transposed, wanted = rest[4], rest[7]
    positions = images if transposed else gradient
    return 2 * positions.numel() * weight[0].numel() * (bool(wanted[0]) + bool(wanted[1]))


_FORMULAS = {**flop_registry, torch.ops.aten.convolution_backward: _backward}


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the convolutions and matrix products that run inside; changes none of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def forget_peak() -> None:
    """Measure the peak from now on, if the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of resident memory becomes what is resident now


def peak_memory() -> int | None:
    """Return the most bytes held at once since `forget_peak`, of the GPU if one is used; None where no system tells."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def environment() -> dict[str, str | int]:
    """Return the versions that take part, the kind of machine, and how many threads there are."""
    known: dict[str, str | int] = {"dpl": dpl.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "pillow", "timm", "torchvision"):
        with contextlib.suppress(PackageNotFoundError):
            known[name] = version(name)
    return known | {"machine": platform.machine(), "threads": torch.get_num_threads()}
