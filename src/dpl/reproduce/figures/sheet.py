"""From a drawing to files: PNG, SVG and PDF, the drawn numbers, and a page that says how they were obtained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from dpl.bench import BenchContext, Cell, Unit
from dpl.bench.selection import chosen, complete
from dpl.core.errors import DataError
from dpl.core.extras import optional
from dpl.reproduce.document import Document, Item, Setup
from dpl.reproduce.facts import protocol_items, setting_items, version_lines
from dpl.reproduce.gather import Gathered
from dpl.reproduce.layouts import Row, network_name
from dpl.reproduce.markdown import escape, item_text, table_line
from dpl.reproduce.plan import make_plan
from dpl.reproduce.request import Request, Result

__all__ = ["FORMATS", "Numbers", "Picture", "finished", "footer", "image_context", "need_rows", "publish"]

FORMATS = ("png", "svg", "pdf")
_PALETTE = 128
_PAPER_NETWORK, _PAPER_SEEDS = "resnet50", 3


@dataclass(frozen=True)
class Numbers:
    """A small table of what is drawn."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A drawing, what it shows in words, and the numbers behind it."""

    figure: Any
    alt: str
    numbers: Numbers
    data: Mapping[str, Any] = field(default_factory=dict)
    """Every drawn value, unrounded."""


def need_rows(name: str, gathered: Gathered, request: Request) -> list[Row]:
    """Return the measured rows, or raise an error that says why there is none."""
    if gathered.rows:
        return list(gathered.rows)
    reasons = "".join(f"\n{item.lines()}" for item in gathered.missing)
    if request.run:
        raise DataError(f"{name}: nothing could be run{reasons}")
    raise DataError(
        f"--no-run: {request.store} holds no result of {name} with these settings; leave --no-run out to run it, or "
        f"name the folder of its results with --store{reasons}"
    )


def finished(gathered: Gathered) -> list[tuple[Cell, Unit]]:
    """Return the cases that are done, each with the unit that counts."""
    store = gathered.store
    return [(case, chosen(case, store).target) for case in gathered.cases if complete(case, store)]


def image_context(path: Path, request: Request) -> BenchContext:
    """Return what is needed to run images through the experiment's networks again."""
    cache = request.cache or request.store / "cache"
    return BenchContext(request.data, make_plan(path, request).files, cache=cache, decoded=request.cache, workers=1)


def footer(gathered: Gathered, rows: Sequence[Row], spread: str = "their mean, band: their range") -> str:
    """Return the line below a figure: on what it was measured, and whether something is still missing."""
    seeds, images = {row["seed"] for row in rows}, sorted({row["n"] for row in rows})
    count = f"{images[0]:,}" if len(images) == 1 else f"{images[0]:,} to {images[-1]:,}"
    told = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds: {spread}"
    text = f"{rows[0]['network']}, {count} images of each stream; {told}"
    done = sum(complete(case, gathered.store) for case in gathered.cases)
    if done == len(gathered.cases) and not gathered.missing:
        return text
    return f"{text}\nPartial: {done} of {len(gathered.cases)} runs; what is missing is listed beside the figure"


def publish(name: str, title: str, claim: str, picture: Picture, gathered: Gathered, request: Request) -> Result:
    """Write the figure in all formats, its page and its data."""
    used = [{**row, "label": row["method"]} for row in gathered.rows]  # settings by method: labels are values of x
    missing = gathered.missing
    document = Document(
        name=name,
        title=title,
        grids=(),
        differences=_differences(used),
        missing=tuple(Item(i.subject, request.anonymous(i.text), request.anonymous(i.drawing)) for i in missing),
        paper=(),
        notes=(),
        setup=Setup(protocol_items(used), setting_items(used), version_lines(used), request.anonymous(request.command)),
    )
    request.out.mkdir(parents=True, exist_ok=True)
    files = [*_save(picture.figure, request.out, name)]
    for suffix, text in (("md", _page(document, claim, picture)), ("json", _json(document, claim, picture))):
        files.append(request.out / f"{name}.{suffix}")
        files[-1].write_text(text, encoding="utf-8")
    return Result(tuple(files), document, gathered.failed, missing)


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write all formats; text stays text in SVG, and the same drawing gives the same bytes."""
    matplotlib = optional("matplotlib", "bench")
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    dateless: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        for path in paths:
            figure.savefig(path, dpi=120, metadata=dateless.get(path.suffix[1:]))
    _shrink(paths[0])
    optional("matplotlib.pyplot", "bench").close(figure)
    return paths


def _shrink(path: Path) -> None:
    """Write a PNG again with a palette: flat colours lose nothing, and the file is a third."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def _differences(rows: Sequence[Row]) -> tuple[str, ...]:
    seeds = {row["seed"] for row in rows}
    networks = dict.fromkeys(row["network"] for row in rows if network_name(row["network"]) != _PAPER_NETWORK)
    limits = sorted({row["limit"] for row in rows if row["limit"] is not None})
    found = [
        f"Measured with {', '.join(networks)}, the paper with {_PAPER_NETWORK}: shapes and orders can be compared, not "
        "heights."
        if networks
        else "",
        f"At most {', '.join(map(str, limits))} images of each domain were used." if limits else "",
        f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}; the paper has {_PAPER_SEEDS}."
        if len(seeds) < _PAPER_SEEDS
        else "",
        *dict.fromkeys(note for row in rows for note in row["data_notes"]),
    ]
    return tuple(text for text in found if text)


def _page(document: Document, claim: str, picture: Picture) -> str:
    numbers = picture.numbers
    table = [table_line(map(escape, numbers.headers)), table_line(["---", *["---:"] * (len(numbers.headers) - 1)])]
    table += [table_line(map(escape, row)) for row in numbers.rows]
    parts = [
        f"# {escape(document.title)}",
        f"![{escape(picture.alt)}]({document.name}.png)",
        f"What the paper shows: {escape(claim)}",
        "\n".join(table),
    ]
    for title, items in document.sections():
        parts += [f"## {title}", "\n".join(map(item_text, items))]
    return "\n\n".join(parts) + "\n"


def _json(document: Document, claim: str, picture: Picture) -> str:
    record = document.record() | {"claim": claim, "alt": picture.alt, "data": dict(picture.data)}
    return json.dumps(record, indent=1) + "\n"
