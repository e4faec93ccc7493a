"""Experiment files: YAML that describes grids of runs, read strictly; a wrong key is named with the nearest right one.

What a file says can also be given as a mapping with the same keys.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

import dpl
from dpl.bench.images import CLEAN, CORRUPTED, DOMAINS, FOLDER
from dpl.bench.selection import PAPER_GRID
from dpl.bench.unit import SourceData, StreamSettings
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.settings import Checked, setting
from dpl.data.sets import normalise_name
from dpl.data.transforms import make_transform
from dpl.streams import PROTOCOLS

__all__ = [
    "BY_DOMAIN", "LEAVE_ONE_OUT", "SHIPPED", "SINGLE_SOURCE", "MethodEntry", "Section", "load_file", "read_sections",
    "shipped_or", "within",
]  # fmt: skip

SHIPPED = Path(dpl.__file__).parent / "configs"
"""The experiment files of the package."""

BY_DOMAIN = LEAVE_ONE_OUT, SINGLE_SOURCE = "leave_one_domain_out", "single_source"
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")

SettingGrid = Mapping[str, tuple[Any, ...]]
"""Settings with the values to choose from."""
Reader = Callable[[str, Any], Any]
"""Takes a key and what a file says, and returns the value of the field."""


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.holdout in (0, 1):
            raise SettingError(f"holdout={self.holdout}: expected a fraction between 0 and 1, without both ends")


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
        sections = [_section({**content, **part}) for part in parts]
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

    def construct_text(self, node: yaml.ScalarNode) -> str | float:
        """Return a number for a text that is one."""
        return float(node.value) if _EXPONENT.fullmatch(node.value) else str(node.value)


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


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


def _section(values: dict[str, Any]) -> Section:
    fields = dataclasses.fields(Section)
    _check_keys(values, [f.name for f in fields])
    given = {"name": values.get("dataset", "section")} | {
        key: value for key, value in values.items() if value is not None
    }
    if missing := [f.name for f in fields if f.default is f.default_factory is MISSING and f.name not in given]:
        raise SettingError(f"{', '.join(missing)}: missing")
    with within(str(given["name"])):
        return Section(**_read(Section, given, _READERS))


def _check_keys(values: Iterable[str], known: Iterable[str]) -> None:
    for key in values:
        if key not in known:
            raise SettingError(f"unknown key {key!r}. {did_you_mean(str(key), known)}")


def _read(kind: type, values: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return values as the fields of a settings class have them: by a reader of their own, or by their type."""
    types = get_type_hints(kind)
    return {
        key: readers[key](key, value) if key in readers else _typed(types[key], key, value)
        for key, value in values.items()
    }


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

    def read(key: str, value: Any) -> str:
        spelled = {normalise_name(choice): choice for choice in choices}
        if normalise_name(str(value)) not in spelled:
            raise SettingError(f"{key}: {value!r} is unknown. {did_you_mean(str(value), choices)}")
        return spelled[normalise_name(str(value))]

    return read


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{key}={value!r}: expected settings with their values")
    return {str(name): entry for name, entry in value.items()}


def _corrupt(key: str, value: Any) -> Any:
    """Return the seed: `true` is 0, `false` means that the images are used as they are on disk."""
    if isinstance(value, bool):
        return 0 if value else None
    return value


def _transform(key: str, value: Any) -> str:
    make_transform(_typed(str, key, value))
    return str(value)


def _source(key: str, value: Any) -> str | dict[str, Any]:
    if value == "rest":
        return "rest"
    known = [f.name for f in dataclasses.fields(SourceData)]
    if not isinstance(value, Mapping) or "dataset" not in value:
        raise SettingError(f"{key}={value!r}: expected 'rest', or a mapping with {', '.join(known)}")
    with within(key):
        _check_keys(value, known)
        read = _read(SourceData, value, _SOURCE_READERS)
        SourceData(**read)  # checks the values; the batch size may still be the method's
        if read["dataset"] == FOLDER and not read.get("domains"):
            raise SettingError("dataset: folder needs domains: [path below the data folder]")
    return read


def _selection(key: str, value: Any) -> SettingGrid | None:
    if isinstance(value, bool):
        return PAPER_GRID if value else None
    if not isinstance(value, Mapping):
        raise SettingError(f"{key}={value!r}: expected true, false, or settings with lists of values")
    return _grid(key, value) or None


def _grid(key: str, value: Any) -> SettingGrid:
    grid = _mapping(key, value)
    for name, entries in grid.items():
        if not isinstance(entries, (list, tuple)) or not entries:
            raise SettingError(f"{key}: {name}={entries!r}: expected a list of values to choose from")
    return {name: tuple(entries) for name, entries in grid.items()}


def _methods(key: str, value: Any) -> tuple[MethodEntry, ...]:
    """Read a list of names, or rows with what is set for each alone."""
    rows = dict.fromkeys(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    if not isinstance(rows, Mapping) or not rows:
        raise SettingError(f"{key}: expected a list of method names, or a mapping of names to their settings")
    return tuple(_method(str(label), entry) for label, entry in rows.items())


def _method(label: str, entry: Any) -> MethodEntry:
    with within("methods"):
        settings = {"method": label} | _mapping(label, {} if entry is None else entry)
        with within(label):
            if "grid" in settings:
                settings["grid"] = _grid("grid", settings["grid"])
            own = {name: settings.pop(name) for name in _OF_METHOD if name in settings}
            return MethodEntry(label=label, settings=settings, **own)


_OF_METHOD = ("method", "batch_size", "grid", "selection")
_SOURCE_READERS: dict[str, Reader] = {
    "dataset": _one_of(*DOMAINS, *CLEAN, FOLDER),
    "part": _one_of("whole", "inside"),
    "transform": _transform,
}
_READERS: dict[str, Reader] = {
    "dataset": _one_of(*DOMAINS, *CORRUPTED, *CLEAN, FOLDER),
    "protocol": _one_of(LEAVE_ONE_OUT, SINGLE_SOURCE, *PROTOCOLS),
    "methods": _methods,
    "corrupt": _corrupt,
    "outliers": _one_of("noise", *DOMAINS, *CLEAN),
    "transform": _transform,
    "settings": _mapping,
    "source": _source,
    "selection": _selection,
}
