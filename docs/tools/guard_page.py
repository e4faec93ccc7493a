"""The guard as a page: settings, actions with their reasons, and signals."""

import dataclasses
import inspect
import re

from dpl.guard import ComparisonResult, GuardSettings
from dpl.guard.events import ACTIONS
from dpl.guard.policy import REASONS
from tools.markdown import escaped, render
from tools.settings_table import HEADERS, table_rows

__all__ = ["guard_page"]

# Actions on single images or steps, whose reason is a sentence made at the time.
_OTHER_REASONS = {
    "set_aside": "an image has a value that is not finite or too large: excluded, the others are predicted without it",
    "not_learnt": "a constant frame or a further copy of an image: the source model predicts it, nothing is learned",
    "undo": "logits, loss or weights are not finite after the update: the state before it is restored",
    "suspect": "half of the limit is reached: the source model predicts this batch, and every batch is checked",
}
_ADDED_SIGNALS = {
    "drift": "how far the trained parameters moved, relative to their size",
    "selected": "fraction of the batch that the method updates on, if it selects",
}


def guard_page() -> str:
    """Return the page of the guard as Markdown."""
    reasons = _OTHER_REASONS | REASONS
    if missing := [action for action in ACTIONS if action not in reasons]:
        raise ValueError(f"no reason for {', '.join(missing)}: add it in docs/tools/guard_page.py")
    actions = [(f"`{action}`", escaped(reasons[action])) for action in ACTIONS]
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
    lines = inspect.getsource(ComparisonResult).splitlines()
    found = [match for line in lines if (match := re.match(r"\s+(\w+): \w+.*?#\s*(.*)", line))]
    comments = {match[1]: match[2] for match in found}
    names = [field.name for field in dataclasses.fields(ComparisonResult)]
    return {name: comments[name] for name in names} | _ADDED_SIGNALS
