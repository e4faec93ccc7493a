"""A document in every format, each file seen whole or not at all."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from dpl.reproduce.document import Document
from dpl.reproduce.html import to_html
from dpl.reproduce.latex import to_latex
from dpl.reproduce.markdown import to_markdown

__all__ = ["FORMATS", "write"]


def _to_json(document: Document) -> str:
    return json.dumps(document.record(), indent=1) + "\n"


FORMATS: Mapping[str, Callable[[Document], str]] = {
    "md": to_markdown,
    "tex": to_latex,
    "html": to_html,
    "json": _to_json,
}
"""Writers by the suffix of their files."""


def write(document: Document, folder: Path) -> tuple[Path, ...]:
    """Write `<name>.md`, `.tex`, `.html` and `.json` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return tuple(_write(folder / f"{document.name}.{suffix}", form(document)) for suffix, form in FORMATS.items())


def _write(path: Path, text: str) -> Path:
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
    return path
