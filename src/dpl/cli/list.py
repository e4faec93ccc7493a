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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("method", nargs="?", help="show the settings of this method (X+dpl too)")


def record(kind: type[Method[Any]]) -> dict[str, Any]:
    """Return the metadata of a method as plain data."""
    defaults, info = {name: default for name, default, _ in describe(kind.settings_class)}, kind.info
    needs = {
        "linear classifier": info.needs_classifier,
        "BatchNorm": info.needs_norm,
        f"source data ({info.source})": info.source != "never",
        "images in [0, 1]": info.views,
        f"batch of {info.min_batch}": info.min_batch > 1,
    }
    return {
        **dataclasses.asdict(info),
        "trains": defaults.get("scope", "-") if issubclass(kind.settings_class, GradientSettings) else "-",
        "norm": defaults["norm"],
        "output": defaults.get("output", "before"),
        "needs": [need for need, needed in needs.items() if needed],
    }


def run(args: argparse.Namespace) -> None:
    """Print methods or settings."""
    if args.method is not None:
        _print_settings(args.method, args.json)
        return
    records = [record(get_method(name)) for name in list_methods()]
    if args.json:
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
