"""An experiment as one frozen record; the hash of what it says names the folder of its results."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.settings import Checked, make_settings, setting
from dpl.methods import get_method
from dpl.methods.base import Method

__all__ = ["FORMAT", "SourceData", "Unit", "method_kind", "resolved_settings"]

FORMAT = 1
Settings = Mapping[str, Any]
_LATER_FIELDS = ("imbalance", "outliers", "outlier_ratio", "stream_speed", "changing")


@dataclass(frozen=True, kw_only=True)
class SourceData(Checked):
    """Labelled images that a method may use beside the stream."""

    dataset: str
    """Name of a data set, or `folder` for images in class folders at the paths `domains` below the data folder."""
    domains: tuple[str, ...] = ()
    part: str = setting("whole", "inside: DomainBed's training split; rest: clean images outside the stream",
                        choices=("whole", "inside", "rest"))  # fmt: skip
    split: str | None = setting(None, "of data sets that have both", choices=(None, "train", "test"))
    transform: str | None = setting(None, "of these images, if not that of the stream")
    batch_size: int = setting(200, "labelled images per batch", low=1)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One method on one stream, from the source model on: everything that its figures depend on, and no path.

    Files appear as the SHA-256 of their content, settings with all their values, so that equal keys mean equal work.
    """

    dataset: str
    domains: tuple[str, ...]
    """What is streamed: domains, or corruptions, in this order."""
    severities: tuple[int, ...] = ()
    corrupt: int | None = None
    """Seed with which corruptions are regenerated from clean images; None: the images on disk."""
    part: str = "whole"
    """`whole`, or a part of DomainBed's split of each domain: `inside` (80 %) or `outside`."""
    holdout: float = 0.2
    limit: int | None = None
    """At most so many images of each domain, the same ones under every corruption."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Options of the data set that are files (`images`, `classes`), by the hash of their content."""
    transform: str = "unchanged"
    protocol: str = "reset_each_shift"
    order: str = "numpy"
    delta: float | None = None
    visits: int | None = None
    batch_size: int
    seed: int
    """Of the split, the order of the stream, and the method's own random numbers."""
    network: str
    weights: str
    """SHA-256 of the file of the source weights."""
    trained_on: tuple[str, ...] = ()
    """Source domains, where the network was trained on some domains of the data set."""
    method: str
    settings: Settings = field(default_factory=dict)
    source: SourceData | None = None
    imbalance: float | None = None
    """How many times more samples the most frequent class has than the rarest; None: as they are."""
    outliers: str | None = None
    """`noise`, or a data set whose images are of no known class and are mixed into the stream."""
    outlier_ratio: float = 1.0
    """Outliers for each image of a known class."""
    stream_speed: float | None = None
    """Batches that arrive in the time of one prediction; None: the stream waits for the model."""
    changing: int | None = None
    """Corruptions fade into each other, in steps of so many images; None: each has its own part of the stream."""

    @cached_property
    def key(self) -> str:
        """The name of the unit's folder."""
        record = {"format": FORMAT, **self.record(), "settings": _keyed_settings(self.method, self.settings)}
        for field_ in dataclasses.fields(self):  # a field that came later must not rename stored results
            if field_.name in _LATER_FIELDS and record[field_.name] == field_.default:
                del record[field_.name]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def title(self) -> str:
        """A short name for people."""
        return f"{self.method} on {self.stream_title}"

    @property
    def stream_title(self) -> str:
        """A short name of the stream, which all methods share."""
        severities = f"@{','.join(map(str, self.severities))}" if self.severities else ""
        return f"{self.dataset}/{','.join(self.domains)}{severities}, seed {self.seed}"

    def record(self) -> dict[str, Any]:
        """Return the unit as plain data."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Unit":
        """Return the unit that `record()` was made from."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in record.keys() - known:
            raise DataError(f"unit record: unknown field {name!r}. {did_you_mean(name, known)}")
        values = _with_tuples(record)
        if values.get("source"):
            values["source"] = SourceData(**_with_tuples(values["source"]))
        return cls(**values)


def _with_tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


@cache
def method_kind(name: str) -> type[Method[Any]]:
    """Return a method's class; a large grid asks for the same few many thousand times."""
    return get_method(name)


def resolved_settings(method: str, values: Settings) -> dict[str, Any]:
    """Return every setting of a method with its value, given some of them; plain data only."""
    resolved = dict(vars(make_settings(method_kind(method).settings_class, repr(method), values)))
    for name, value in resolved.items():
        if callable(value):
            raise SettingError(f"{method}: {name} is a function, which an experiment's record cannot hold")
    return resolved


def _keyed_settings(method: str, settings: Settings) -> dict[str, Any]:
    """Return settings as the key knows them: renamed ones by their former name, later ones where they matter."""
    known = {f.name: f for f in dataclasses.fields(method_kind(method).settings_class)}
    keyed = {}
    for name, value in settings.items():
        facts = known[name].metadata if name in known else {}
        if not (facts.get("later") and value == known[name].default):
            keyed[facts.get("formerly") or name] = value
    return keyed
