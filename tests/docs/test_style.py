"""The language of the pages: short pages, short lines, short sentences, the usual terms."""

import re
from pathlib import Path

import pytest

from docs.pages import DOCS, ROOT, name, pages

HAND_WRITTEN = {  # words of prose, without code and tables
    "adding-a-method": 700,
    "architecture": 500,
    "bench": 700,
    "choosing-a-method": 500,
    "concepts": 500,
    "corruptions": 350,
    "datasets": 700,
    "dpl": 550,
    "dpl-soft": 1000,
    "getting-started": 600,
    "how-dpl-works": 750,
    "index": 250,
    "interop": 250,
    "internals/guard": 900,
    "internals/speed": 800,
    "networks": 450,
    "networks-howto": 450,
    "performance": 900,
    "protocols": 900,
    "recipes/drifting-camera": 200,
    "recipes/fleet": 200,
    "recipes/new-hospital": 200,
    "recipes/night-and-day": 200,
    "recipes/scanner-change": 200,
    "reference/experiment-file": 600,
    "reference/files": 350,
    "reliability": 900,
    "report": 350,
    "reproduce": 500,
    "results/README": 500,
    "results/calibration": 300,
    "results/dpl_choices": 300,
    "results/one_class": 250,
    "results/figures": 700,
    "saving": 400,
    "scale": 700,
    "serving": 900,
    "training": 500,
    "troubleshooting": 700,
    "tutorial-compare": 500,
    "tutorial-own-model": 600,
}
GENERATED = {
    "devices": 400,
    "methods": 200,
    "reference/cli": 200,
    "reference/guard": 100,
    "reference/http": 200,
    "reference/python": 150,
    "reference/settings": 150,
    "results/claims": 150,
    "results/cluster-cost": 300,
    "results/reliability": 200,
    "results/speed": 160,
}
IN_ALL = 22_000
METHOD_PAGE, DATA_PAGE = 280, 120  # outside collapsed blocks
LINE, CHANGELOG_LINE, CODE_LINE, SENTENCE, README_LINES = 100, 120, 80, 40, 100
BANNED = (
    "source answers|the source's answers?",
    "to the bit|bit for bit",
    "learnt",
    "usual way|usual / ours",
    "x source|x floor",
    "within the mark|outside the mark",
    "in other company",
    "poor stre(?:am|tch)",
    "sorted by class|class-sorted",
    "shuffled streams?",
    "fading classes",
    "slow forgetting",
    "(?:is|are|was|were|be) set aside|sets? aside",
    "in the shadow|stays? beside",
    "does not learn|still model",
    "at home",
    "slow twin",
    "goes on where it was|go on where it was",
    "rules of the house",
    "ladder|rungs?",
    "in-split",
    "begun again|anew",
    "probation",
    "stands? back",
)

SITE = [page for page in pages() if page.is_relative_to(DOCS)]


def key(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix() if page.is_relative_to(DOCS) else page.stem


def parts(page: Path) -> tuple[list[str], list[str]]:
    """Return the lines of prose and the lines of code; tables, comments and collapsed blocks are neither."""
    prose, code, fenced, collapsed = list[str](), list[str](), False, False
    for line in page.read_text().splitlines():
        collapsed = line.startswith("??? ") or (collapsed and (line.startswith("    ") or not line.strip()))
        if line.strip().startswith("```"):
            fenced = not fenced
        elif fenced:
            code.append(line)
        elif not (collapsed or line.startswith(("|", "<!--", "![", ":::"))):
            prose.append(line)
    return prose, code


def plain(line: str) -> str:
    """Return a line without the targets of links and with one word for each piece of code."""
    return re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", line))


def words(page: Path) -> int:
    return sum(len(re.findall(r"\w[\w'’.,%/-]*", plain(line))) for line in parts(page)[0] if not line.startswith("#"))


def sentences(page: Path) -> list[str]:
    text = "\n".join(map(plain, parts(page)[0]))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|^#.*$", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for block in blocks for part in re.split(r"(?<=[.!?:;])\s+", block) if part.strip()]


def limit(page: Path) -> int:
    usual = METHOD_PAGE if page.parent == DOCS / "methods" else DATA_PAGE
    return (HAND_WRITTEN | GENERATED).get(key(page), usual)


def test_every_page_has_a_kind() -> None:
    others = {key(page) for page in SITE} - (HAND_WRITTEN | GENERATED).keys()
    assert not [page for page in others if not page.startswith(("methods/", "results/"))], "give it a limit of words"


@pytest.mark.parametrize("page", SITE, ids=name)
def test_pages_are_short(page: Path) -> None:
    assert words(page) <= limit(page)


def test_hand_written_pages_are_short_in_all() -> None:
    found = {page: words(DOCS / f"{page}.md") for page in HAND_WRITTEN}
    assert sum(found.values()) <= IN_ALL, f"{sum(found.values())} words: {found}"


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", pages(), ids=name)
def test_lines_are_short(page: Path) -> None:
    prose, code = parts(page)
    longest = CHANGELOG_LINE if page.stem == "CHANGELOG" else LINE
    # A link cannot be broken.
    assert not [line for line in prose if len(re.sub(r"\]\([^)]*\)", "]", line)) > longest]
    generated = page.parent == DOCS / "methods" or key(page) in GENERATED  # equations and help, as the code has them
    assert not [line for line in code if len(line) > CODE_LINE and not generated]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_sentences_are_short(page: Path) -> None:
    assert not [sentence for sentence in sentences(page) if len(sentence.split()) > SENTENCE]


@pytest.mark.parametrize("page", [page for page in pages() if page.parent != DOCS / "methods"], ids=name)
def test_terms_are_those_of_the_field(page: Path) -> None:
    text = " ".join(" ".join(map(plain, parts(page)[0])).split())
    found = [match.group() for term in BANNED for match in re.finditer(rf"\b(?:{term})\b", text, re.IGNORECASE)]
    assert not found
