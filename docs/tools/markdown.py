"""Small pieces of Markdown, and the templates that put pages together."""

import re
import textwrap
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = ["WIDTH", "escaped", "render", "wrapped"]

WIDTH = 100  # characters in a line of prose


def render(template: str, **values: Any) -> str:
    """Fill a template of docs/tools/templates and return the page."""
    text = _environment().get_template(template).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def wrapped(text: str, indent: str = "") -> str:
    """Join the lines of a paragraph and break them anew at the page's width."""
    return textwrap.fill(
        " ".join(text.split()), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def escaped(text: str) -> str:
    """Keep Markdown from reading signs of formulas as its own; code between backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*_<>|])", r"\\\1", piece) for piece in pieces)


def _cell(value: Any) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(value).split()))


def _environment() -> Environment:
    environment = Environment(  # noqa: S701 (Markdown, not HTML, and from our own code alone)
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _cell, "wrapped": wrapped, "escaped": escaped}
    return environment
