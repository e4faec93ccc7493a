"""Small parts of an adaptive model: its lock, its state by name, its source data and their fingerprint."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import SettingError
from dpl.guard.state_copy import stays_on_host
from dpl.methods.base import Source

__all__ = ["NOT_STORABLE", "Lock", "as_batches", "fingerprint_of", "is_fixed", "part_of", "storable"]

NOT_STORABLE = "<function>"
_SOURCE_BATCH = 64


class Lock:
    """One writer at a time; a copy of the model gets a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, _memo: object) -> Lock:
        return Lock()


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the entries of a state below `name`, without that prefix."""
    return {key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}.")}


def is_fixed(key: str) -> bool:
    """Say whether an entry of the state stays on the CPU in its own type."""
    return stays_on_host(key) or (key.startswith("guard.") and not key.startswith("guard.healthy."))


def storable(value: Any) -> Any:
    """Return a setting as a file can hold it."""
    return NOT_STORABLE if callable(value) else value


def as_batches(source: Source | tuple[Tensor, Tensor] | None) -> Source | None:
    """Cut one pair of tensors into batches; leave a loader as it is."""
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor):
        images, labels = source
        parts = range(0, len(images), _SOURCE_BATCH)
        return [(images[i : i + _SOURCE_BATCH], labels[i : i + _SOURCE_BATCH]) for i in parts]
    if isinstance(source, Iterator):
        raise SettingError(
            "source is an iterator that can be read only once: pass a loader, a list of batches or a pair"
        )
    return source


def fingerprint_of(module: nn.Module) -> str:
    """Hash the source weights, so that a snapshot is never put on another model."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
