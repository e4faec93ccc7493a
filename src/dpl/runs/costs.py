"""What adaptation costs: arithmetic counted operator by operator, the most memory held at once, and on what it ran."""

import contextlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import dpl

__all__ = ["SAMPLE_EVERY", "Work", "environment", "forget_peak", "peak_memory"]

SAMPLE_EVERY = 8  # batches: counting one in eight costs nothing that a clock could show
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


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
        turn = self._batches % SAMPLE_EVERY == 1  # never the first: a model may look at one image beforehand
        self._batches += 1
        if not turn:
            yield
            return
        counter = _Counter()
        with counter:
            yield
        self._images += images
        self._flops += counter.flops


def _backward(
    gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, *rest: Any, out_val: Any = None
) -> int:
    """Count a convolution's backward pass: as much as forward for each of the two gradients that are asked for.

    torch's own formula takes no notice of groups and is far too high for depthwise layers.
    """
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
        _CLEAR.write_text("5")  # Linux: the peak of resident memory becomes what is resident now


def peak_memory() -> int | None:
    """Return the most bytes held at once since `forget_peak`: of the GPU if one is used, else of this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError, ValueError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def environment() -> dict[str, str | int]:
    """Return the versions that take part, the kind of machine, and how many threads there are."""
    known: dict[str, str | int] = {"dpl": dpl.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "pillow", "timm", "torchvision"):
        with contextlib.suppress(PackageNotFoundError):
            known[name] = version(name)
    return known | {"machine": platform.machine(), "threads": torch.get_num_threads()}
