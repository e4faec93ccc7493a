"""docs/reference/guard.md says what the code does."""

import dataclasses
import re
from pathlib import Path

from dpl.estimate import Comparison
from dpl.guard import GuardSettings
from dpl.guard.events import ACTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "guard.md").read_text()
NAMES = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_every_setting_is_there_with_its_default_and_meaning() -> None:
    for field in dataclasses.fields(GuardSettings):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{field.name}` |"))
        assert f"| `{field.default!r}` |" in row
        assert row.endswith(f"| {field.metadata['help']} |")


def test_every_action_and_every_signal_is_explained() -> None:
    signals = {field.name for field in dataclasses.fields(Comparison)} | {"drift", "lost", "selected"}
    settings = {field.name for field in dataclasses.fields(GuardSettings)}
    assert signals | settings | set(ACTIONS) == NAMES
    assert not re.findall(r"^\| `\w+` \|\s*\|$", PAGE, re.MULTILINE), "a meaning is missing"
