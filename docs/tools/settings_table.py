"""Settings as rows of a table: name, default, valid values, meaning."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["HEADERS", "shown", "table_rows"]

HEADERS = ("setting", "default", "valid", "meaning")


def table_rows(kind: type[Any], names: Iterable[str] | None = None) -> list[list[str]]:
    """Return one row for each field of a settings class, or for the named ones."""
    chosen = None if names is None else set(names)
    hints = get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if chosen is None or field.name in chosen]
    return [
        [f"`{field.name}`", f"`{shown(field.default)}`", _valid(field, hints[field.name]), field.metadata["help"]]
        for field in fields
    ]


def shown(value: Any) -> str:
    """Return a default as Python would write it; of a function, its name."""
    return getattr(value, "__name__", "a function") if callable(value) else repr(value)


def _valid(field: "dataclasses.Field[Any]", hint: Any) -> str:
    low, high, choices = (field.metadata.get(key) for key in ("low", "high", "choices"))
    choices = choices or (get_args(hint) if get_origin(hint) is Literal else None)
    if choices is not None:
        return ", ".join(f"`{choice!r}`" for choice in choices)
    if isinstance(field.default, bool):
        return "`True`, `False`"
    if low is None and high is None:
        return "see meaning"
    if not any(end is not None and math.isfinite(end) for end in (low, high)):
        return "a number"
    whole = "whole number, " if isinstance(field.default, int) else ""
    if low is not None and high is not None:
        return f"{whole}{low:g} to {high:g}"
    return f"{whole}≥ {low:g}" if high is None else f"{whole}≤ {high:g}"
