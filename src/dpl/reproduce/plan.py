"""From an experiment file to the cases that this machine has weights for, and what it lacks for the others."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dpl.bench import Cell, FileLocations, read_grid
from dpl.bench.images import CORRUPTED, DOMAINS, known_domains
from dpl.bench.section import LEAVE_ONE_OUT, SINGLE_SOURCE, Section, read_sections
from dpl.core.errors import DataError, SettingError
from dpl.data import open_benchmark
from dpl.data.folders import shorten
from dpl.data.sets import choose_domains
from dpl.reproduce.document import Item
from dpl.reproduce.request import Request

__all__ = ["Plan", "data_item", "make_plan"]

_QUICK_LIMIT = 200
_QUICK = {"selection": False, "oracle": False}

Values = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What an experiment file comes to on this machine."""

    title: str
    sections: tuple[Section, ...]
    cases: tuple[Cell, ...]
    files: Mapping[str, Path]
    missing: tuple[Item, ...]


def make_plan(path: Path, request: Request, only: Collection[str] | None = None) -> Plan:
    """Read an experiment file stream by stream, so that one without weights does not cost the others.

    `only` names the rows that are wanted, None all of them.
    """
    title, sections = read_sections(path)
    _check_rows(path, sections, only)
    places = FileLocations(request.data, request.weights, path.parent)
    cases: list[Cell] = []
    missing: list[Item] = []
    for section, values in zip(sections, _merged(path), strict=True):
        absent = _absence(section, places)
        if absent is not None:
            missing.append(absent)
            if request.run:
                continue
        found, lacking = _section_cases(section, values | (_QUICK if request.quick else {}), path, places, request)
        cases += [case for case in found if only is None or case.label in only]
        missing += [Item(section.name, f"{shorten(streams)}: {reason}") for reason, streams in _by_reason(lacking)]
    return Plan(title, tuple(sections), tuple(cases), places.files, tuple(missing))


def _check_rows(path: Path, sections: Sequence[Section], only: Collection[str] | None) -> None:
    if only is not None and not any(entry.label in only for section in sections for entry in section.methods):
        raise SettingError(f"{path}: it has none of the rows wanted here: {', '.join(only)}")


def _merged(path: Path) -> list[Values]:
    """Return the keys of each section as they stand in the file, which has been checked by then."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    parts = content.pop("sections", [{}])
    return [{**content, **part} for part in parts]


def _section_cases(
    section: Section, values: Values, path: Path, places: FileLocations, request: Request
) -> tuple[list[Cell], list[tuple[str, str]]]:
    """Return the cases of a section that have their source weights, and of the others name and reason."""
    cases: list[Cell] = []
    lacking: list[tuple[str, str]] = []
    limit = min(request.limit or _QUICK_LIMIT, _QUICK_LIMIT) if request.quick else request.limit
    with TemporaryDirectory() as folder:
        piece = Path(folder) / path.name
        for change in _streams(section, request):
            piece.write_text(
                yaml.safe_dump(values | change | {"name": section.name}, sort_keys=False), encoding="utf-8"
            )
            try:
                cases += read_grid(piece, places, limit=limit).cells
            except DataError as error:
                lacking.append((_title(change), str(error)))
            except SettingError as error:
                raise SettingError(str(error).replace(str(piece), str(path))) from error
    return cases, lacking


def _title(change: Values) -> str:
    """Return a short name for one stream."""
    ends = "->".join(str(change[key][0]) for key in ("sources", "targets") if key in change)
    return f"{ends} seed {change['seeds'][0]}".strip()


def _by_reason(lacking: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Put streams together that lack the same; where each lacks a file of its own, the first stands for all."""
    if len({reason for _, reason in lacking}) == len(lacking) > 1:
        return [(f"{lacking[0][1]} (for the first of them)", [stream for stream, _ in lacking])]
    reasons = dict.fromkeys(reason for _, reason in lacking)
    return [(reason, [stream for stream, other in lacking if other == reason]) for reason in reasons]


def _streams(section: Section, request: Request) -> Iterator[Values]:
    """Yield the changes that make of a section one stream with one seed: the smallest part with weights of its own."""
    sources: list[str] | list[None] = [None]
    targets: list[str] | list[None] = [None]
    if section.protocol in (LEAVE_ONE_OUT, SINGLE_SOURCE):
        known = DOMAINS[section.dataset]
        targets = choose_domains(section.dataset, section.targets, known)
        sources = (
            choose_domains(section.dataset, section.sources, known) if section.protocol == SINGLE_SOURCE else [None]
        )
    for source, target, seed in product(sources, targets, _seeds(section.seeds, request)):
        if source is None or source != target:
            chosen = {"sources": source, "targets": target}
            yield {"seeds": [seed]} | {key: [name] for key, name in chosen.items() if name is not None}


def _seeds(seeds: tuple[int, ...], request: Request) -> tuple[int, ...]:
    """Return as many seeds as asked for: those of the file, then the numbers after them."""
    count = 1 if request.quick and request.seeds is None else request.seeds or len(seeds)
    further = range(max(seeds) + 1, max(seeds) + 1 + count)
    return (*seeds, *further)[:count]


def _absence(section: Section, places: FileLocations) -> Item | None:
    """Say what is wrong with a section's data set, None where it can be opened."""
    options: Values = {}
    try:
        for name in ("images", "classes"):
            if value := getattr(section, name):
                options[name] = places.find(value)
        if section.dataset in CORRUPTED:
            first = (section.domains or known_domains(section.dataset, True))[:1]
            options |= {"domains": first, "severity": section.severities[0]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told again when it is run
            open_benchmark(section.dataset, places.data, **options)
    except DataError as error:
        return data_item(section.name, error)
    return None


def data_item(subject: str, error: Exception) -> Item:
    """Return an error as an entry: its first line in words, a layout below it as a drawing."""
    text, _, layout = str(error).partition("\nexpected:\n")
    return Item(subject, f"{text}; expected layout" if layout else text, layout)
