"""docs/reliability.md says what the code does."""

import dataclasses
import re
from pathlib import Path

from dpl.guard import ComparisonResult, GuardSettings
from dpl.guard.events import ACTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
NAMES = {name for cell in re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}


def test_every_setting_is_there_with_its_default_and_meaning() -> None:
    for field in dataclasses.fields(GuardSettings):
        default = "none" if field.default is None else field.default
        assert f"| `{field.name}` | {default} | {field.metadata['help']} |" in PAGE


def test_every_action_and_every_signal_is_explained() -> None:
    signals = {field.name for field in dataclasses.fields(ComparisonResult)} - {"rows"} | {"drift", "selected"}
    settings = {field.name for field in dataclasses.fields(GuardSettings)}
    assert signals | settings | set(ACTIONS) == NAMES
