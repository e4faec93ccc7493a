"""Hook of mkdocs: an entry `folder/*.md` of the navigation becomes one entry for each page of that folder.

So a new method or result is in the navigation as soon as its page is there.
"""

from pathlib import Path
from typing import Any

__all__ = ["expand", "on_config"]


def on_config(config: Any) -> Any:
    """Expand the navigation before mkdocs reads it."""
    config["nav"] = expand(config["nav"], Path(config["docs_dir"]))
    return config


def expand(entry: Any, docs: Path) -> Any:
    """Return the navigation below `entry` with every pattern replaced by the pages that match it."""
    if isinstance(entry, dict):
        return {title: expand(below, docs) for title, below in entry.items()}
    if isinstance(entry, list):
        parts = [expand(below, docs) for below in entry]
        return [page for part in parts for page in (part if isinstance(part, list) else [part])]
    return _pages(entry, docs) if "*" in entry else entry


def _pages(pattern: str, docs: Path) -> list[str]:
    """Return matching pages by name, an overview first."""
    found = [path.relative_to(docs).as_posix() for path in docs.glob(pattern)]
    return sorted(found, key=lambda name: (not name.endswith(("README.md", "index.md")), name))
