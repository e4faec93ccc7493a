"""The `dpl` command. Each sub-command is a module of this package with `add_arguments(parser)` and `run(args)`."""

import argparse
import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from dpl import __version__
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import DplError, SettingError, did_you_mean

__all__ = ["main"]

# Sub-command: what it is for. The module is imported only when its command is used or its help asked for.
COMMANDS = {
    "demo": "show adaptation at work on real images, offline",
    "adapt": "predict a folder of images with a model that adapts to them",
    "recommend": "say which method and settings suit a folder of images, and why",
    "serve": "serve a model over HTTP that adapts to each stream of images",
    "train": "train a source model on the source domains",
    "bench": "run an experiment file over methods, data sets and seeds, and resume it",
    "report": "show runs of bench or adapt as one page that opens from disk",
    "reproduce": "run a table of the paper and show it, measured beside reported",
    "corrupt": "make corrupted copies of clean images, as in CIFAR-10-C and ImageNet-C",
    "export": "write an adapted model as a plain one that needs no dpl",
    "doctor": "check the environment, a model and its images; list why figures differ from a table's",
    "list": "list the methods, or the settings of one",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for a wrong name, path or value)."""
    words = [*(sys.argv[1:] if argv is None else argv)]  # `list` is a sub-command here
    chosen = words[0] if words and words[0] in COMMANDS else None
    name = "dpl" if chosen is None else f"dpl {chosen}"
    usual_format = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without the line of code that gave it
    try:
        return _run(words, chosen)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (DplError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; what was finished is kept", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = usual_format


class _Parser(argparse.ArgumentParser):
    """Raises an error for `main` to print in one line; for a misspelled option it names the nearest."""

    def error(self, message: str) -> NoReturn:
        if (option := message.removeprefix("unrecognized arguments: ")) != message:
            message += f". {did_you_mean(option.split()[0], self._option_string_actions)}"
        raise SettingError(message)


def _run(words: list[str], chosen: str | None) -> int:
    if chosen is None:
        parser = _overview()
        parser.parse_args(words)
        parser.print_help()
        return 0
    command, purpose = importlib.import_module(f"dpl.cli.{chosen}"), COMMANDS[chosen]
    parser = _Parser(prog=f"dpl {chosen}", description=f"{purpose[0].upper()}{purpose[1:]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    command.add_arguments(parser)
    args = parser.parse_args(words[1:], argparse.Namespace(typed=shlex.join(["dpl", *words])))
    keep_freed_memory()
    return int(command.run(args) or 0)


def _overview() -> _Parser:
    parser = _Parser(prog="dpl", description="Reliable test-time adaptation of image classifiers.")
    parser.add_argument("--version", action="version", version=f"dpl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser
