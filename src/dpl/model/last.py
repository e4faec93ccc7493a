"""What the last step of an adaptive model did."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from dpl.methods.base import Fact

__all__ = ["Last"]


class Last(Mapping[str, Any]):
    """What the last step did. Reads as a mapping or by attribute; values come to the host only when read."""

    def __init__(self, facts: Mapping[str, Fact | Callable[[], Any]]) -> None:
        self._facts = dict(facts)

    def __getitem__(self, key: str) -> Any:
        value = self._facts[key]
        value = value() if callable(value) else value
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):  # asked for by copy and pickle before the object is filled
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"the last step recorded no {key!r}; it has {', '.join(self._facts)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __repr__(self) -> str:
        return f"Last({', '.join(f'{key}={self[key]!r}' for key in self)})"
