"""Experiment files: YAML that describes grids of runs, read strictly; a wrong key is named with the nearest right one.

What a file says can also be given as a mapping with the same keys.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

import dpl
from dpl.bench.images import CLEAN, CORRUPTED, DOMAINS, FOLDER
from dpl.bench.unit import SourceData, StreamSettings
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.settings import Checked, setting
from dpl.data.sets import normalise_name
from dpl.data.transforms import make_transform
from dpl.streams import PROTOCOLS

__all__ = [
    "BY_DOMAIN", "LEAVE_ONE_OUT", "PAPER_GRID", "SHIPPED", "SINGLE_SOURCE", "MethodEntry", "Section", "load_file",
    "read_sections", "shipped_or", "within",
]  # fmt: skip

SHIPPED = Path(dpl.__file__).parent / "configs"  # the experiment files of the package
BY_DOMAIN = LEAVE_ONE_OUT, SINGLE_SOURCE = "leave_one_domain_out", "single_source"
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$")

SettingGrid = Mapping[str, tuple[Any, ...]]  # settings with the values to choose from
PAPER_GRID: SettingGrid = {"lr": (5e-6, 5e-5, 5e-4), "steps": (1, 2)}
Reader = Callable[[str, Any], Any]  # takes a key and what a file says, and returns the value of the field
C = TypeVar("C", bound=Checked)


@dataclass(frozen=True, kw_only=True)
class MethodEntry(Checked):
    """A row of the table: a method, with what is set for it alone."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = setting(None, "images per batch, if not the section's", low=1)
    grid: SettingGrid | None = setting(None, "settings to search, if not the section's")
    selection: bool = setting(True, "search settings for this method")


@dataclass(frozen=True, kw_only=True)
class Section(StreamSettings, Checked):
    """One grid of a file: every method on every stream with every seed."""

    name: str = setting(MISSING, "title of the section's table; by default the data set")
    protocol: str = setting(MISSING, "what is streamed, in which order, and when the model is reset")
    weights: str = setting(MISSING, "file of the source weights; {dataset}, {target}, {seed} ... are filled in")
    methods: tuple[MethodEntry, ...] = setting(MISSING, "list of methods, or a mapping of row names to settings")
    domains: tuple[str, ...] | None = setting(None, "domains or corruptions to stream; by default all")
    targets: tuple[str, ...] | None = setting(None, "target domains; by default all")
    sources: tuple[str, ...] | None = setting(None, "source domains of protocol single_source; by default all")
    severities: tuple[int, ...] = setting((5,), "severities of corruptions", low=1, high=5)
    images: str | None = setting(None, "file that lists the images of the data set to use")
    classes: str | None = setting(None, "file that lists the classes of the data set to use")
    seeds: tuple[int, ...] = setting((0,), "seeds of split, stream order and method", low=0)
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "settings for all methods"})
    source: str | Mapping[str, Any] | None = setting(None, "source images for methods that need them, or rest")
    selection: SettingGrid | None = setting(None, "settings to choose on the source domains; true: the paper's")
    oracle: bool = setting(False, "also report the settings that are best on the target")


def shipped_or(path: Path) -> Path:
    """Return a file that exists as it is, otherwise the one of that name that ships with the package, if any."""
    shipped = SHIPPED / f"{path.stem}.yaml"
    return shipped if shipped.is_file() and not path.exists() else path


def read_sections(source: Path | Mapping[str, Any]) -> tuple[str, list[Section]]:
    """Return the title of an experiment and its grids: one, or those under `sections` with the rest as default."""
    content = load_file(shipped_or(source)) if isinstance(source, Path) else dict(source)
    title = str(content.pop("title", source.stem if isinstance(source, Path) else "experiment"))
    parts = content.pop("sections", [{}])
    with within(str(source) if isinstance(source, Path) else title):
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts) or not parts:
            raise SettingError("sections: expected a list of mappings, each with the keys of one grid")
        sections = []
        for values in ({**content, **part} for part in parts):
            values["name"] = str(values.get("name") or values.get("dataset") or "section")
            with within(values["name"]):
                sections.append(_read(Section, values, _READERS))
        names = [section.name for section in sections]
        if len(set(names)) < len(names):
            raise SettingError(f"sections need different names (name: ...), found {', '.join(names)}")
    return title, sections


@contextmanager
def within(place: str) -> Iterator[None]:
    """Put the place of a wrong setting before its description."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{place}: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML without its two traps: of a key that stands twice the last is kept, and `5e-5` is text, having no point."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that stands twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                mark = key.start_mark
                raise SettingError(f"{mark.name}, line {mark.line + 1}: duplicate key {key.value!r}")
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"+-0123456789"])


def load_file(path: Path) -> dict[str, Any]:
    """Return the keys of an experiment file, not yet checked."""
    try:
        with path.open(encoding="utf-8") as file:
            content = _Loader(file).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as an experiment file ({error})") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f", line {place.line + 1}" if place else ""
        raise SettingError(f"{path}{where}: not YAML ({getattr(error, 'problem', error)})") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path}: expected keys such as dataset, network, methods; found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _read(kind: type[C], values: Mapping[str, Any], readers: Mapping[str, Reader]) -> C:
    """Make settings of what a file says: each value by a reader of its own, or by the type of its field."""
    types, fields = get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise SettingError(f"unknown key {key!r}. {did_you_mean(str(key), fields)}")
    given = {key: value for key, value in values.items() if value is not None}
    if missing := [n for n, f in fields.items() if f.default is f.default_factory is MISSING and n not in given]:
        raise SettingError(f"{', '.join(missing)}: missing")
    read = {key: readers.get(key) or partial(_typed, types[key]) for key in given}
    return kind(**{key: read[key](key, value) for key, value in given.items()})


def _typed(kind: Any, key: str, value: Any) -> Any:
    """Return a tuple for a list or a single entry, a float for a whole number, a text that is not empty."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    inner = next((get_args(part)[0] for part in kinds if get_origin(part) is tuple), None)
    if inner is not None:
        entries = value if isinstance(value, (list, tuple)) else [value]
        if not entries:
            raise SettingError(f"{key}: an empty list; leave the key out for the default")
        return tuple(dict.fromkeys(_typed(inner, key, entry) for entry in entries))
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # 1 and 1.0 name the same results
    if str in kinds and not (isinstance(value, str) and value):
        raise SettingError(f"{key}={value!r}: expected a name")
    return value


def _one_of(*choices: str) -> Reader:
    """Return a reader that takes a choice in any spelling: `Office-Home` for `office_home`."""
    spelled = {normalise_name(choice): choice for choice in choices}

    def read(key: str, value: Any) -> str:
        if normalise_name(str(value)) not in spelled:
            raise SettingError(f"{key}: {value!r} is unknown. {did_you_mean(str(value), choices)}")
        return spelled[normalise_name(str(value))]

    return read


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{key}={value!r}: expected settings with their values")
    return {str(name): entry for name, entry in value.items()}


def _source(key: str, value: Any) -> str | dict[str, Any]:
    if value == "rest":
        return "rest"
    if not isinstance(value, Mapping) or "dataset" not in value:
        known = ", ".join(f.name for f in dataclasses.fields(SourceData))
        raise SettingError(f"{key}={value!r}: expected 'rest', or a mapping with {known}")
    with within(key):
        source = _read(SourceData, value, _SOURCE_READERS)
        if source.dataset == FOLDER and not source.domains:
            raise SettingError("dataset: folder needs domains: [path below the data folder]")
    return {name: getattr(source, name) for name in value if value[name] is not None}  # others may be the method's


def _grid(key: str, value: Any) -> SettingGrid | None:
    """Read settings to choose from; `true` is the paper's, `false` none."""
    if isinstance(value, bool):
        return PAPER_GRID if value else None
    if not isinstance(value, Mapping):
        raise SettingError(f"{key}={value!r}: expected true, false, or settings with lists of values")
    for name, entries in value.items():
        if not isinstance(entries, (list, tuple)) or not entries:
            raise SettingError(f"{key}: {name}={entries!r}: expected a list of values to choose from")
    return {str(name): tuple(entries) for name, entries in value.items()}


def _methods(key: str, value: Any) -> tuple[MethodEntry, ...]:
    """Read a list of names, or rows with what is set for each alone."""
    rows = dict.fromkeys(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    if not isinstance(rows, Mapping) or not rows:
        raise SettingError(f"{key}: expected a list of method names, or a mapping of names to their settings")
    entries = []
    for label, row in rows.items():
        with within(key):
            values = {"method": str(label)} | _mapping(str(label), {} if row is None else row)
        own = {name: values.pop(name) for name in ("method", "batch_size", "grid", "selection") if name in values}
        with within(f"{key}: {label}"):
            entries.append(_read(MethodEntry, {"label": str(label), "settings": values, **own}, {"grid": _grid}))
    return tuple(entries)


def _transform(_key: str, value: Any) -> str:
    make_transform(str(value))
    return str(value)


_SOURCE_READERS: dict[str, Reader] = {
    "dataset": _one_of(*DOMAINS, *CLEAN, FOLDER),
    "part": _one_of("whole", "inside"),
    "transform": _transform,
}
_READERS: dict[str, Reader] = {
    "dataset": _one_of(*DOMAINS, *CORRUPTED, *CLEAN, FOLDER),
    "protocol": _one_of(LEAVE_ONE_OUT, SINGLE_SOURCE, *PROTOCOLS),
    "outliers": _one_of("noise", *DOMAINS, *CLEAN),
    "corrupt": lambda key, value: (0 if value else None) if isinstance(value, bool) else value,
    "methods": _methods,
    "transform": _transform,
    "settings": _mapping,
    "source": _source,
    "selection": lambda key, value: _grid(key, value) or None,
}
