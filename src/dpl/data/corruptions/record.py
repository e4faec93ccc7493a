"""The record of settings that a folder of corrupted images was made with."""

import json
from collections.abc import Callable
from pathlib import Path

from dpl.core.errors import DataError, SettingError
from dpl.core.files import write_file

__all__ = ["Progress", "keep_record"]

Progress = Callable[[int, int], None]  # called with the number done and the number in all

_RECORD = "corruptions.json"


def keep_record(target: Path, settings: dict[str, int | str]) -> None:
    """Write the settings to the target folder, or raise a SettingError if it was made with others.

    A second run keeps the files that exist; without this check a run with another seed would mix with the first.
    """
    path = target / _RECORD
    if not path.exists():
        write_file(path, json.dumps(settings, indent=1) + "\n")
        return
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); choose another target or delete this one") from error
    for name in settings:
        if not isinstance(noted, dict) or noted.get(name) != settings[name]:
            before = noted.get(name) if isinstance(noted, dict) else noted
            raise SettingError(
                f"{target} was made with {name}={before!r}, now {name}={settings[name]!r}: choose another target, or "
                "delete this one to make it again."
            )
