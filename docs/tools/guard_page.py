"""The guard as a page: settings, actions with their reasons, and signals."""

import dataclasses
import inspect
import re

from dpl.estimate import Comparison
from dpl.guard import GuardSettings
from dpl.guard.events import ACTIONS
from tools.markdown import escaped, render
from tools.settings_table import HEADERS, table_rows

__all__ = ["guard_page"]

_ADDED_SIGNALS = {
    "lost": "estimated predictions lost since adaptation last did well, beyond the allowance",
    "drift": "how far the trained parameters moved, relative to their size",
    "selected": "fraction of the batch that the method updates on, if it selects",
}


def guard_page() -> str:
    """Return the page of the guard as Markdown."""
    actions = [(f"`{action}`", escaped(reason)) for action, reason in ACTIONS.items()]
    signals = [(f"`{name}`", escaped(meaning)) for name, meaning in _signals().items()]
    return render(
        "guard.md.jinja",
        example=dataclasses.fields(GuardSettings)[0],
        headers=HEADERS,
        settings=table_rows(GuardSettings),
        actions=actions,
        signals=signals,
    )


def _signals() -> dict[str, str]:
    """Return every signal with the comment beside its field."""
    lines = inspect.getsource(Comparison).splitlines()
    found = [match for line in lines if (match := re.match(r"\s+(\w+): \w+.*?#\s*(.*)", line))]
    comments = {match[1]: match[2] for match in found}
    names = [field.name for field in dataclasses.fields(Comparison)]
    return {name: comments[name] for name in names} | _ADDED_SIGNALS
