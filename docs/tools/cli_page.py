"""The command line as a page: every command with its arguments and options, read from the parsers."""

import argparse
import importlib
from typing import Any

from dpl.cli import COMMANDS
from tools.markdown import escaped, render

__all__ = ["cli_page"]


def cli_page() -> str:
    """Return the page of all commands as Markdown."""
    commands = [_command(name, purpose) for name, purpose in COMMANDS.items()]
    overview = [(f"[`dpl {c['name']}`](#dpl-{c['name']})", c["purpose"]) for c in commands]
    return render("cli.md.jinja", commands=commands, overview=overview)


def _command(name: str, purpose: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog=f"dpl {name}")
    importlib.import_module(f"dpl.cli.{name}").add_arguments(parser)
    groups = [(group.title or "", _options(group)) for group in parser._action_groups]
    named = [("" if title in ("positional arguments", "options") else title, rows) for title, rows in groups if rows]
    return {"name": name, "purpose": f"{purpose[0].upper()}{purpose[1:]}.", "groups": named, "epilog": parser.epilog}


def _options(group: "argparse._ArgumentGroup") -> list[list[str]]:
    shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]
    return [[_written(action), _default(action), escaped(_help(action))] for action in shown]


def _written(action: argparse.Action) -> str:
    """Return an option as one writes it: `--batch-size N`, `{a,b}` for choices, `METHOD` for a positional argument."""
    value = _value(action)
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{' ' + value if value else ''}`"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    text = name if isinstance(name, str) else " ".join(name)
    repeated = {"+": f"{text} ...", "*": f"[{text} ...]", "?": f"[{text}]"}
    return repeated.get(str(action.nargs), text)


def _default(action: argparse.Action) -> str:
    nothing = action.default in (None, False, [], (), argparse.SUPPRESS)
    return "" if nothing or action.nargs == 0 else f"`{action.default}`"


def _help(action: argparse.Action) -> str:
    """Return the help with its placeholders filled, without the default that has a column of its own."""
    text = (action.help or "") % (vars(action) | {"prog": "dpl"})
    return text.replace(f" (default: {action.default})", "").replace(f"default: {action.default}", "")
