"""Hand-written pages are short and in plain English: the rules that a test can check."""

import re
from pathlib import Path

import pytest

from docs.pages import DOCS, ROOT

# The most words of prose that a page may have, without code and tables.
LIMITS = {
    "index": 250,
    "getting-started": 600,
    "tutorial-own-model": 600,
    "tutorial-compare": 500,
    "adding-a-method": 700,
    "choosing-a-method": 500,
    "networks-howto": 450,
    "saving": 300,
    "reliability": 900,
    "performance": 900,
    "serving": 900,
    "training": 500,
    "bench": 700,
    "scale": 700,
    "reproduce": 500,
    "report": 350,
    "corruptions": 350,
    "troubleshooting": 700,
    "protocols": 900,
    "datasets": 700,
    "networks": 450,
    "reference/experiment-file": 600,
    "reference/files": 350,
    "concepts": 500,
    "how-dpl-works": 750,
    "dpl": 550,
    "auto": 550,
    "architecture": 500,
    "internals/guard": 900,
    "internals/speed": 800,
}
PAGES = {name: DOCS / f"{name}.md" for name in LIMITS} | {
    name: ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")
}
# Private words and figures of speech; docs/concepts.md has the words to use.
BANNED = (
    *("learnt", "to the bit", "bit for bit", "the usual way", "in other company", "the source answers", "ladder"),
    *("rung", "poor stream", "in the shadow", "at home", "slow twin", "in-split", "begun again", "anew"),
    *("rules of the house", "goes on where", "probation", "stand back"),
)
LONGEST_PROSE, LONGEST_CODE, LONGEST_SENTENCE, README_LINES = 100, 80, 40, 100


def lines_of(page: Path) -> tuple[list[str], list[str]]:
    """Return the lines of prose (with tables left out) and those of code blocks."""
    prose, code, inside = [], [], False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside:
            code.append(line)
        elif not line.startswith(("|", "![", "<!--")):
            prose.append(line)
    return prose, code


def sentences_of(prose: list[str]) -> list[str]:
    return re.split(r"(?<=[.!?:])\s+|\n\n|\n(?=\s*(?:[-*]|\d+\.) )|\n#", "\n".join(prose))


@pytest.mark.parametrize("name", LIMITS)
def test_a_page_is_not_longer_than_its_limit(name: str) -> None:
    prose, _ = lines_of(PAGES[name])
    assert len(re.findall(r"\w\S*", "\n".join(prose))) <= LIMITS[name]


@pytest.mark.parametrize("name", PAGES)
def test_lines_fit_a_screen(name: str) -> None:
    prose, code = lines_of(PAGES[name])
    assert [line for line in prose if len(line) > LONGEST_PROSE] == []
    assert [line for line in code if len(line) > LONGEST_CODE] == []


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short_and_plain(name: str) -> None:
    prose, _ = lines_of(PAGES[name])
    assert [text for text in sentences_of(prose) if len(text.split()) > LONGEST_SENTENCE] == []
    text = " ".join(" ".join(prose).lower().split())
    assert [term for term in BANNED if re.search(rf"\b{term}\b", text)] == []


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
