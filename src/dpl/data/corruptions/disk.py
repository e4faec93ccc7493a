"""What both writers of corrupted data sets share: files that appear only when whole, and a record of the settings."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpl.core.errors import DataError, SettingError

__all__ = ["Progress", "keep_record", "renamed_when_whole"]

Progress = Callable[[int, int], None]  # called with the number done and the number in all

_RECORD = "corruptions.json"


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; it gets its real name only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def keep_record(target: Path, settings: dict[str, int | str]) -> None:
    """Note the settings in the target folder, or raise a SettingError where others were noted there before.

    Files that exist are kept on a second run; without this check a run with another seed would mix with the first.
    """
    path = target / _RECORD
    if not path.exists():
        with renamed_when_whole(path) as temporary:
            temporary.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
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
