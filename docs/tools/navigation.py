"""Hook of mkdocs: the entry `methods/*.md` of the navigation becomes the methods by group, each under its own name.

The groups and names are those of docs/methods.md and of the pages, so a new method needs no entry in mkdocs.yml.
"""

import re
from pathlib import Path
from typing import Any

__all__ = ["expand", "on_config"]

_PATTERN = "methods/*.md"


def on_config(config: Any) -> Any:
    """Expand the navigation before mkdocs reads it."""
    config["nav"] = expand(config["nav"], Path(config["docs_dir"]))
    return config


def expand(entry: Any, docs: Path) -> Any:
    """Return the navigation below `entry` with the pattern replaced by the groups of methods."""
    if isinstance(entry, dict):
        return {title: expand(below, docs) for title, below in entry.items()}
    if isinstance(entry, list):
        return [page for below in entry for page in (_groups(docs) if below == _PATTERN else [expand(below, docs)])]
    return entry


def _groups(docs: Path) -> list[dict[str, list[dict[str, str]]]]:
    """Return one section for each group of docs/methods.md that has methods."""
    sections = re.split(r"^## ", (docs / "methods.md").read_text(), flags=re.MULTILINE)[1:]
    groups = []
    for section in sections:
        pages = re.findall(r"\]\((methods/\w+\.md)\)", section)
        if pages:
            groups.append({section.splitlines()[0]: [{_title(docs / page): page} for page in pages]})
    return groups


def _title(page: Path) -> str:
    return page.read_text().splitlines()[0].removeprefix("# ").replace("\\", "")
