"""The few exception types of the library; each message names the argument, what came and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "DataError",
    "DplError",
    "InputError",
    "MissingExtraError",
    "ModelError",
    "SettingError",
    "SnapshotCorrupt",
    "SnapshotError",
    "did_you_mean",
]


class DplError(Exception):
    """Root of everything the library raises on purpose."""


class SettingError(DplError, ValueError):
    """A method name, setting or option that does not exist or has a wrong value."""


class InputError(DplError, ValueError):
    """A batch of images that cannot be predicted: shape, dtype, device or non-finite values."""


class ModelError(DplError, ValueError):
    """A network in which something that the method needs cannot be found."""


class DataError(DplError, ValueError):
    """A data set, image folder or checkpoint file that is missing, incomplete or unreadable."""


class MissingExtraError(DplError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class SnapshotError(DplError):
    """A snapshot that does not fit the model or the method it is loaded into."""


class SnapshotCorrupt(SnapshotError):  # noqa: N818 - the state of a file, not of the program
    """A snapshot whose bytes are not those that were written."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a sentence naming the nearest valid choice, or all of them when none is near."""
    choices = sorted(valid)
    near = get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else f"Valid: {', '.join(choices)}."
