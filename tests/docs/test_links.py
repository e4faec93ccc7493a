"""Every link leads somewhere, every page is in the navigation, every picture has a text."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.pages import DOCS, ROOT, anchors, links, name, pages, prose


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert not broken, f"{name(page)} links to {broken}"


@pytest.mark.parametrize("page", [page for page in pages() if page.is_relative_to(DOCS)], ids=name)
def test_pages_of_the_site_link_inside_the_site(page: Path) -> None:
    """A link out of docs/ works on a forge and is broken on the built site."""
    outside = [
        link for link in links(page) if not (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)
    ]
    assert not outside


@pytest.mark.parametrize("page", pages(), ids=name)
def test_pictures_have_a_text(page: Path) -> None:
    assert not re.findall(r"!\[\s*\]\(", prose(page))


def test_every_page_is_in_the_navigation() -> None:
    spec = importlib.util.spec_from_file_location("navigation", DOCS / "tools" / "navigation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    shown = _leaves(module.expand(nav, DOCS))
    assert len(shown) == len(set(shown)), "a page is in the navigation twice"
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(shown) == written, f"not in mkdocs.yml: {written - set(shown)}; gone: {set(shown) - written}"


def _leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [leaf for part in below for leaf in _leaves(part)]
