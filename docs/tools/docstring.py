"""Read the docstring of a method: name, purpose, equations, and labelled parts such as "Departures:"."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Docstring", "read_docstring"]

_LABELS = {
    "updates": "updates",
    "needs": "needs",
    "output": "output",
    "departure": "departures",
    "departures": "departures",
}
_LABEL_WORDS = 10  # a label may be longer, as in "Departures from the authors' code:", but not much


@dataclass
class Docstring:
    """The parts of a method's docstring, as plain text."""

    name: str
    purpose: str
    blocks: list[tuple[str, str]] = field(default_factory=list)  # ("text" or "equation", content), in order
    parts: dict[str, str] = field(default_factory=dict)  # updates, needs, output, departures


def read_docstring(text: str) -> Docstring:
    """Read a docstring; what has no label stays in `blocks`, so nothing is lost."""
    title, *paragraphs = [part for part in re.split(r"\n\s*\n", text.strip("\n")) if part.strip()]
    name, _, purpose = " ".join(title.split()).partition(": ")
    found = Docstring(name, purpose)
    for paragraph in paragraphs:
        for kind, piece in _pieces(paragraph):
            if kind == "equation":
                found.blocks.append((kind, piece))
            else:
                _sort_sentences(piece, found)
    return found


def _pieces(paragraph: str) -> Iterator[tuple[str, str]]:
    """Part indented lines (equations) from sentences; indented lines below a lone label are its text."""
    kind, lines, labelled = "", list[str](), False
    for line in paragraph.splitlines():
        labelled = (_label(line) is not None and line.rstrip().endswith(":")) or (labelled and line.startswith(" "))
        now = "equation" if line.startswith("    ") and not labelled else "text"
        if now != kind and lines:
            yield kind, "\n".join(lines)
            lines = []
        kind = now
        lines.append(line[4:] if now == "equation" else line.strip())
    yield kind, "\n".join(lines)


def _sort_sentences(text: str, found: Docstring) -> None:
    """Give each sentence to the label before it in the same paragraph, or to the blocks if there is none."""
    label, loose = "", list[str]()
    for sentence in re.split(r"(?<=[.;])\s+(?=[A-Z])", " ".join(text.split())):
        new = _label(sentence)
        if new is not None:
            head, _, rest = sentence.partition(":")
            _, _, limit = head.partition(", ")  # as in "Departures, undone by `authors=True`:"
            label, sentence = new, f"{limit}: {rest.strip()}" if limit else rest.strip()
        if label:
            found.parts[label] = f"{found.parts.get(label, '')} {sentence}".strip()
        else:
            loose.append(sentence)
    if loose:
        found.blocks.append(("text", " ".join(loose)))


def _label(sentence: str) -> str | None:
    head, colon, _ = sentence.partition(":")
    words = head.split()
    return _LABELS.get(words[0].lower().rstrip(",")) if colon and 0 < len(words) <= _LABEL_WORDS else None
