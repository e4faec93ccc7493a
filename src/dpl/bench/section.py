"""Experiment files: YAML that describes grids of runs, read strictly; a wrong key is named with the nearest one."""

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
from dpl.bench.domains import CLEAN, DOMAINS, FOLDER
from dpl.bench.unit import SourceData, StreamSettings, settings_of
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.settings import Checked, setting
from dpl.data.transforms import make_transform
from dpl.streams import PROTOCOLS

__all__ = [
    "BY_DOMAIN", "LEAVE_ONE_OUT", "SHIPPED", "SINGLE_SOURCE", "MethodEntry", "Section", "load_file", "read_sections",
    "within",
]  # fmt: skip

SHIPPED = Path(dpl.__file__).parent / "configs"  # the experiment files of the package
BY_DOMAIN = LEAVE_ONE_OUT, SINGLE_SOURCE = "leave_one_domain_out", "single_source"
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$")

SettingGrid = Mapping[str, tuple[Any, ...]]  # settings with the values to choose from
_PAPER_GRID: SettingGrid = {"lr": (5e-6, 5e-5, 5e-4), "steps": (1, 2)}
C = TypeVar("C", bound=Checked)


@dataclass(frozen=True, kw_only=True)
class MethodEntry(Checked):
    """A row of the table: a method, with what is set for it alone."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = setting(None, "images per batch, if not the section's", low=1)
    grid: SettingGrid | None = setting(None, "settings to search, if not the section's; none if empty")


@dataclass(frozen=True, kw_only=True)
class Section(StreamSettings):
    """One grid of a file: every method on every stream with every seed."""

    name: str = setting(MISSING, "title of the section's table; by default the data set")
    protocol: str = setting(MISSING, "what is streamed, in which order, and when the model is reset",
                            choices=(*BY_DOMAIN, *PROTOCOLS))  # fmt: skip
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
    source: Mapping[str, Any] | None = setting(None, "source images for methods that need them, or rest")
    selection: SettingGrid | None = setting(None, "settings to choose on the source domains; true: the paper's")
    oracle: bool = setting(False, "also report the settings that are best on the target")

    def __post_init__(self) -> None:
        """Refuse keys that the protocol or the data set would silently ignore."""
        super().__post_init__()
        make_transform(self.transform)
        by_domain = self.protocol in BY_DOMAIN
        resets = by_domain or PROTOCOLS[self.protocol].reset == "each"
        conflicts = [
            (by_domain and self.dataset not in DOMAINS,
             f"protocol {self.protocol}: needs a data set of domains, {self.dataset} is not"),
            (self.dataset == FOLDER and not self.domains,
             "dataset: folder needs domains: [path below the data folder]"),
            (self.selection and not by_domain,
             "selection: needs source domains, so protocol: leave_one_domain_out or single_source"),
            (self.oracle and not self.selection, "oracle: has no effect without selection"),
            (self.targets and not by_domain, "targets: this protocol names its streams by domains"),
            (self.sources and self.protocol != SINGLE_SOURCE, "sources: for protocol: single_source"),
            (self.domains and by_domain, "domains: this protocol names its streams by targets"),
            (self.corrupt is not None and self.dataset not in CLEAN,
             f"corrupt: {self.dataset} is not a set of clean images ({', '.join(CLEAN)})"),
            (self.changing and (self.corrupt is None or self.protocol != "continual"),
             "changing: needs corrupt: true and protocol: continual"),
            (self.changing and (len(self.severities) > 1 or (self.domains is not None and len(self.domains) < 2)),
             "changing: needs one severity, which both corruptions share, and at least two corruptions in domains"),
            (self.source == {"part": "rest"} and self.corrupt is None,
             "source: rest is for clean images that are corrupted here"),
            (self.outliers == self.dataset, "outliers: expected another data set than the stream's, or noise"),
            (self.outliers and self.corrupt is not None and not resets,
             "outliers: are corrupted as the stream is; use a protocol that resets at each corruption"),
        ]  # fmt: skip
        for is_wrong, message in conflicts:
            if is_wrong:
                raise SettingError(message)
        valid = {name for entry in self.methods for name in settings_of(entry.method)}
        for name in [name for name in (*self.settings, *(self.selection or {})) if name not in valid]:
            raise SettingError(f"settings: no method here has {name!r}. {did_you_mean(name, valid)}")


def read_sections(path: Path) -> tuple[str, list[Section]]:
    """Return the title of an experiment and its grids: one, or those under `sections` with the rest as default.

    A file that does not exist is the one of that name that ships with the package, if any.
    """
    shipped = SHIPPED / f"{path.stem}.yaml"
    content = load_file(shipped if shipped.is_file() and not path.exists() else path)
    title, parts = str(content.pop("title", path.stem)), content.pop("sections", [{}])
    with within(str(path)):
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts) or not parts:
            raise SettingError("sections: expected a list of mappings, each with the keys of one grid")
        sections = []
        for values in ({**content, **part} for part in parts):
            values["name"] = str(values.get("name") or values.get("dataset") or "section")
            with within(values["name"]):
                sections.append(_read(Section, values))
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
        raise SettingError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path}: expected keys such as dataset, network, methods; found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _read(kind: type[C], values: Mapping[str, Any]) -> C:
    """Make settings of what a file says: each value by a reader of its own, or by the type of its field."""
    types, fields = get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise SettingError(f"unknown key {key!r}. {did_you_mean(str(key), fields)}")
    given = {key: value for key, value in values.items() if value is not None}
    if missing := [n for n, f in fields.items() if f.default is f.default_factory is MISSING and n not in given]:
        raise SettingError(f"{', '.join(missing)}: missing")
    read = {key: _READERS.get(key) or partial(_typed, types[key]) for key in given}
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


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{key}={value!r}: expected settings with their values")
    return {str(name): entry for name, entry in value.items()}


def _source(key: str, value: Any) -> dict[str, Any]:
    if value == "rest":
        return {"part": "rest"}
    if not isinstance(value, Mapping):
        raise SettingError(f"{key}={value!r}: expected 'rest', or a mapping such as {{dataset: NAME, split: train}}")
    with within(key):
        source = _read(SourceData, value)
        make_transform(source.transform or "unchanged")
        if source.dataset == FOLDER and not source.domains:
            raise SettingError("dataset: folder needs domains: [path below the data folder]")
    return {name: getattr(source, name) for name in value if value[name] is not None}  # others may be the method's


def _grid(key: str, value: Any) -> SettingGrid:
    """Read settings to choose from; `true` is the paper's, `false` none."""
    if isinstance(value, bool):
        return _PAPER_GRID if value else {}
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
        if "selection" in values:
            values["grid"] = values.pop("selection")
        own = {name: values.pop(name) for name in ("method", "batch_size", "grid") if name in values}
        with within(f"{key}: {label}"):
            entries.append(_read(MethodEntry, {"label": str(label), "settings": values, **own}))
    return tuple(entries)


_READERS: dict[str, Callable[[str, Any], Any]] = {  # by the key, which each is given with what the file says
    "corrupt": lambda key, value: (0 if value else None) if isinstance(value, bool) else value,
    "methods": _methods,
    "settings": _mapping,
    "source": _source,
    "selection": _grid,
    "grid": _grid,
}
