"""What the last step of an adaptive model did."""

from collections import UserDict
from typing import Any

from torch import Tensor

__all__ = ["Last"]


class Last(UserDict[str, Any]):
    """What the last step did. Reads as a mapping or by attribute; values come to the host only when read."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        value = value() if callable(value) else value
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def __getattr__(self, key: str) -> Any:
        if key == "data":  # asked for by copy and pickle before the object is filled
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"the last step recorded no {key!r}; it has {', '.join(self)}") from None

    def __repr__(self) -> str:
        return f"Last({', '.join(f'{key}={self[key]!r}' for key in self)})"
