"""How long something takes, for decisions that depend on it."""

import math
import time
from collections.abc import Callable

import torch

__all__ = ["best_seconds"]


def best_seconds(run: Callable[[], object], device: torch.device, runs: int = 3) -> float:
    """Return the best time of a few runs, the first not counted."""
    best = math.inf
    for attempt in range(runs + 1):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt > 0:
            best = min(best, time.perf_counter() - begun)
    return best
