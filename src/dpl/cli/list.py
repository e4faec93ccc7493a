"""`dpl list`: all methods, or the settings of one."""

import argparse
import dataclasses
import sys
from typing import Any

from dpl.cli.console import print_json, print_table
from dpl.core.settings import describe
from dpl.methods import get_method, list_methods
from dpl.methods.base import Method
from dpl.methods.settings import GradientSettings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("method", nargs="?", help="show the settings of this method (X+dpl too)")


def run(args: argparse.Namespace) -> None:
    """Print methods or settings."""
    if args.method is None:
        _print_methods(args.json)
    else:
        _print_settings(args.method, args.json)


def record(kind: type[Method[Any]]) -> dict[str, Any]:
    """Return the metadata of a method as plain data."""
    defaults = {name: default for name, default, _ in describe(kind.settings_class)}
    needs = [word for flag, word in _needs(kind) if flag]
    return {
        **dataclasses.asdict(kind.info),
        "trains": defaults.get("scope", "-") if issubclass(kind.settings_class, GradientSettings) else "-",
        "norm": defaults["norm"],
        "output": defaults.get("output", "before"),
        "needs": needs,
    }


def _needs(kind: type[Method[Any]]) -> list[tuple[bool, str]]:
    info = kind.info
    return [
        (info.needs_classifier, "linear classifier"),
        (info.needs_norm, "BatchNorm"),
        (info.source != "never", f"source data ({info.source})"),
        (info.views, "images in [0, 1]"),
        (info.min_batch > 1, f"batch of {info.min_batch}"),
    ]


def _print_methods(as_json: bool) -> None:
    records = [record(get_method(name)) for name in list_methods()]
    if as_json:
        print_json(records)
        return
    headers = ["method", "trains", "norm", "output", "cost per batch", "host reads", "needs", "paper"]
    keys = ("name", "trains", "norm", "output", "passes", "host_reads")
    rows = [[*(str(r[key]) for key in keys), ", ".join(r["needs"]) or "-", r["paper"]] for r in records]
    print_table(headers, rows)
    print("\nHost reads: how often a step away from a CPU waits for the device, beside the check of the batch.")
    print("X+dpl adds the DPL loss to any X that trains, e.g. eata+dpl. Settings: dpl list METHOD")


def _print_settings(name: str, as_json: bool) -> None:
    kind = get_method(name)
    settings = describe(kind.settings_class)
    if as_json:
        shown = [{"name": n, "default": d if not callable(d) else repr(d), "meaning": m} for n, d, m in settings]
        print_json({**record(kind), "settings": shown})
        return
    print((sys.modules[kind.__module__].__doc__ or "").strip(), end="\n\n")
    print_table(["setting", "default", "meaning"], [[n, repr(d), m] for n, d, m in settings])
