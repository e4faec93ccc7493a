"""The exception types of the library; each message names the argument, its value and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "DataError", "DplError", "InputError", "MissingExtraError", "ModelError", "SettingError", "SnapshotCorrupt",
    "SnapshotError", "did_you_mean",
]  # fmt: skip


class DplError(Exception):
    """Base of all errors that the library raises."""


class SettingError(DplError, ValueError):
    """A method name, setting or option that does not exist or has a wrong value."""


class InputError(DplError, ValueError):
    """A batch of images that cannot be predicted: shape, dtype, device or non-finite values."""


class ModelError(DplError, ValueError):
    """A network without a part that the method needs."""


class DataError(DplError, ValueError):
    """A data set, image folder or checkpoint file that is missing, incomplete or unreadable."""


class MissingExtraError(DplError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class SnapshotError(DplError):
    """A snapshot that does not fit the model or the method it is loaded into."""


class SnapshotCorrupt(SnapshotError):  # noqa: N818 - describes a file, not the program
    """A snapshot whose bytes are not those that were written."""


def did_you_mean(name: str, valid: Iterable[str], otherwise: str | None = None) -> str:
    """Return a sentence with the nearest valid choice; if none is near, `otherwise` or a list of all choices."""
    choices = sorted(valid)
    near = get_close_matches(name, choices, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]!r}?"
    return otherwise or f"Valid: {', '.join(choices)}."
