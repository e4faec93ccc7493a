"""Experiment files: YAML that describes a grid, read strictly; a wrong key is named with the nearest right one."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dpl.bench.images import CLEAN, CORRUPTED, DOMAINS
from dpl.bench.selection import PAPER_GRID
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.data.sets import plain
from dpl.data.transforms import make_transform
from dpl.streams import PROTOCOLS

__all__ = ["LEAVE_ONE_OUT", "SINGLE_SOURCE", "MethodEntry", "Section", "read_sections"]

LEAVE_ONE_OUT, SINGLE_SOURCE = "leave_one_domain_out", "single_source"
_PROTOCOLS = (LEAVE_ONE_OUT, SINGLE_SOURCE, *PROTOCOLS)
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True)
class MethodEntry:
    """A row of the table: a method, with what is set for it alone."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    grid: Mapping[str, tuple[Any, ...]] | None = None
    selection: bool = True


@dataclass(frozen=True, kw_only=True)
class Section:
    """One grid of a file, checked key by key; docs/bench.md explains each."""

    name: str
    dataset: str
    protocol: str
    network: str
    weights: str
    methods: tuple[MethodEntry, ...]
    batch_size: int
    corrupt: int | None = None
    domains: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    severities: tuple[int, ...] = (5,)
    order: str = "numpy"
    delta: float | None = None
    visits: int | None = None
    holdout: float = 0.2
    limit: int | None = None
    images: str | None = None
    classes: str | None = None
    transform: str = "unchanged"
    seeds: tuple[int, ...] = (0,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str | Mapping[str, Any] | None = None
    selection: Mapping[str, tuple[Any, ...]] | None = None
    oracle: bool = False


def read_sections(path: Path) -> tuple[str, list[Section]]:
    """Return the title of an experiment file and its grids: one, or those under `sections` with the rest as default."""
    content = _load(path)
    title = str(content.pop("title", path.stem))
    parts = content.pop("sections", [{}])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts) or not parts:
        raise SettingError(f"{path}: sections: expected a list of mappings, each with the keys of one grid")
    try:
        sections = [_section({**content, **part}) for part in parts]
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error
    names = [section.name for section in sections]
    if len(set(names)) < len(names):
        raise SettingError(f"{path}: sections need different names (name: ...), found {', '.join(names)}")
    return title, sections


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as an experiment file ({error})") from error
    try:
        _refuse_twice(yaml.compose(text, Loader=yaml.SafeLoader), path)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f", line {place.line + 1}" if place else ""
        raise SettingError(f"{path}{where}: not YAML ({getattr(error, 'problem', error)})") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path}: expected keys such as dataset, network, methods; found {type(content).__name__}")
    return {str(key): _numbers(value) for key, value in content.items()}


def _refuse_twice(node: yaml.Node | None, path: Path) -> None:
    """Raise for a key that stands twice in one mapping: YAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise SettingError(f"{path}, line {key.start_mark.line + 1}: {key.value!r} stands twice")
            seen.add(key.value)
            _refuse_twice(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value, path)


def _numbers(value: Any) -> Any:
    """Turn `5e-5`, which YAML takes for text for want of a point, into the number that is meant."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _section(values: dict[str, Any]) -> Section:
    known = [f.name for f in dataclasses.fields(Section)]
    for key in values:
        if key not in known:
            raise SettingError(f"unknown key {key!r}. {did_you_mean(key, known)}")
    required = [f.name for f in dataclasses.fields(Section) if f.default is f.default_factory is dataclasses.MISSING]
    values.setdefault("name", values.get("dataset"))
    if missing := [key for key in required if values.get(key) is None]:
        raise SettingError(f"{', '.join(missing)}: missing")
    checked = {key: _CHECKS[key](key, value) for key, value in values.items() if value is not None}
    if checked.pop("selection", None) is not None:
        checked |= _selection(values["selection"])
    return Section(**checked)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise SettingError(f"{key}: {value!r}; expected a name")
    return value


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        spelled = {plain(choice): choice for choice in choices}
        if plain(str(value)) not in spelled:
            raise SettingError(f"{key}: {value!r} is unknown. {did_you_mean(str(value), choices)}")
        return spelled[plain(str(value))]

    return check


def _whole(least: int) -> Callable[[str, Any], int]:
    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SettingError(f"{key}: {value!r}; expected a whole number of at least {least}")
        return value

    return check


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{key}: {value!r}; expected a number")
    return float(value)


def _share(key: str, value: Any) -> float:
    if not 0 < _number(key, value) < 1:
        raise SettingError(f"{key}: {value!r}; expected a share between 0 and 1")
    return float(value)


def _several(check: Callable[[str, Any], Any]) -> Callable[[str, Any], tuple[Any, ...]]:
    def check_all(key: str, value: Any) -> tuple[Any, ...]:
        entries = value if isinstance(value, list) else [value]
        if not entries:
            raise SettingError(f"{key}: an empty list; leave the key out for the usual ones")
        return tuple(dict.fromkeys(check(key, entry) for entry in entries))

    return check_all


def _corrupt(key: str, value: Any) -> int | None:
    """`true` takes seed 0, a number is the seed, `false` is the images as they lie."""
    if isinstance(value, bool):
        return 0 if value else None
    return _whole(0)(key, value)


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingError(f"{key}: {value!r}; expected settings with their values")
    return {str(name): entry for name, entry in value.items()}


def _transform(key: str, value: Any) -> str:
    make_transform(_text(key, value))
    return str(value)


def _source(key: str, value: Any) -> str | dict[str, Any]:
    if value == "rest":
        return "rest"
    if not isinstance(value, dict) or "dataset" not in value:
        raise SettingError(f"{key}: {value!r}; expected 'rest', or a mapping with {', '.join(_SOURCE)}")
    for name in value:
        if name not in _SOURCE:
            raise SettingError(f"{key}: unknown key {name!r}. {did_you_mean(str(name), _SOURCE)}")
    checked = {name: _SOURCE[name](f"{key}: {name}", entry) for name, entry in value.items()}
    if checked["dataset"] == "folder" and not checked.get("domains"):
        raise SettingError(f"{key}: dataset: folder needs domains: [path below the data folder]")
    return checked


def _bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{key}: {value!r}; expected true or false")
    return value


def _keep(key: str, value: Any) -> Any:
    if not isinstance(value, bool | dict):
        raise SettingError(f"{key}: {value!r}; expected true, false, or settings with lists of values")
    return value or None


def _selection(value: Any) -> dict[str, Any]:
    """Return the grid to search; `true` means the paper's."""
    if value is True:
        return {"selection": PAPER_GRID}
    return {"selection": _grid("selection", value)}


def _grid(key: str, value: Any) -> dict[str, tuple[Any, ...]]:
    grid = _mapping(key, value)
    for name, entries in grid.items():
        if not isinstance(entries, list) or not entries:
            raise SettingError(f"{key}: {name}: {entries!r}; expected a list of values to choose from")
    return {name: tuple(entries) for name, entries in grid.items()}


def _methods(key: str, value: Any) -> tuple[MethodEntry, ...]:
    """Read a list of names, or rows with what is set for each alone."""
    rows = dict.fromkeys(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    if not isinstance(rows, dict) or not rows:
        raise SettingError(f"{key}: expected a list of method names, or a mapping of names to their settings")
    return tuple(_method(str(label), {} if entry is None else entry) for label, entry in rows.items())


def _method(label: str, entry: Any) -> MethodEntry:
    values = _mapping(f"methods: {label}", entry)
    own: dict[str, Any] = {"method": values.pop("method", label)}
    for name, check in (("batch_size", _whole(1)), ("grid", _grid), ("selection", _bool)):
        if name in values:
            own[name] = check(f"methods: {label}: {name}", values.pop(name))
    return MethodEntry(label=label, settings=values, **own)


_SOURCE: dict[str, Callable[[str, Any], Any]] = {
    "dataset": _one_of(*DOMAINS, *CLEAN, "folder"),
    "domains": _several(_text),
    "part": _one_of("whole", "inside"),
    "split": _one_of("train", "test"),
    "transform": _transform,
    "batch_size": _whole(1),
}
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "dataset": _one_of(*DOMAINS, *CORRUPTED, *CLEAN),
    "protocol": _one_of(*_PROTOCOLS),
    "network": _text,
    "weights": _text,
    "methods": _methods,
    "batch_size": _whole(1),
    "corrupt": _corrupt,
    "domains": _several(_text),
    "targets": _several(_text),
    "sources": _several(_text),
    "severities": _several(_whole(1)),
    "order": _text,
    "delta": _number,
    "visits": _whole(1),
    "holdout": _share,
    "limit": _whole(1),
    "images": _text,
    "classes": _text,
    "transform": _transform,
    "seeds": _several(_whole(0)),
    "settings": _mapping,
    "source": _source,
    "selection": _keep,
    "oracle": _bool,
}
