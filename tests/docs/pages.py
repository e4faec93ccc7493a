"""Read the pages: their code blocks, links and headings."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_RUN = "<!-- not run"  # such a comment before a block says why


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    runs: bool


def pages() -> list[Path]:
    return sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[Block]:
    """Return the fenced blocks of one language; `runs` is False after a comment that begins with `<!-- not run`."""
    found, start, kind, before = [], 0, "", ""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and not start:
            start, kind = number, line[3:].strip()
        elif line.startswith("```"):
            text = "\n".join(lines[start : number - 1])
            found.append(Block(kind, text, start, not before.startswith(NOT_RUN)))
            start, before = 0, ""
        elif line.strip() and not start:
            before = line
    return [block for block in found if block.language == language]


def prose(path: Path, spans: bool = False) -> str:
    """Return a page without its code; `spans` keeps what stands in single backticks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return text if spans else re.sub(r"`[^`\n]*`", "code", text)


def links(path: Path) -> list[str]:
    """Return the targets of all links and pictures that stay inside the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(path: Path) -> set[str]:
    """Return the names by which headings can be linked to, made as forges and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", prose(path, spans=True), flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
