"""The entry point of the command `dpl`, outside the package so that Ctrl-C while that is imported is caught."""

import sys

__all__ = ["main"]


def main() -> int:
    """Import the command line and run it."""
    try:
        from dpl.cli import main as run
    except KeyboardInterrupt:
        print("dpl: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    return run()
