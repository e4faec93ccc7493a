"""An experiment as one frozen record, whose hash names the folder of its results, and the cells of a table."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache, cached_property
from typing import Any

from dpl.bench.domains import CLEAN, CORRUPTED, DOMAINS, FOLDER
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.settings import Checked, make_settings, setting
from dpl.methods import get_method
from dpl.streams.protocol import Order

__all__ = [
    "Candidate", "Cell", "SourceData", "StreamSettings", "Unit", "kind_of", "resolved_settings", "settings_of",
    "with_tuples",
]  # fmt: skip

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SourceData(Checked):
    """Labelled images that a method may use beside the stream."""

    dataset: str = setting(MISSING, "name of the data set, or folder: class folders at the paths of `domains`",
                           choices=(*DOMAINS, *CLEAN, FOLDER))  # fmt: skip
    domains: tuple[str, ...] = ()
    part: str = setting("whole", "inside: training split; rest: out of the stream", choices=("whole", "inside", "rest"))
    split: str | None = setting(None, "of data sets that have both", choices=(None, "train", "test"))
    transform: str | None = setting(None, "of these images, if not that of the stream")
    batch_size: int = setting(200, "labelled images per batch", low=1)


@dataclass(frozen=True, kw_only=True)
class StreamSettings(Order):
    """What a section of an experiment file and each of its units say alike."""

    dataset: str = setting(MISSING, "name of the data set, or folder: class folders at the paths of `domains`",
                           choices=(*DOMAINS, *CORRUPTED, *CLEAN, FOLDER))  # fmt: skip
    network: str = setting(MISSING, "name of the network")
    batch_size: int = setting(MISSING, "images per batch", low=1)
    corrupt: int | None = setting(None, "corrupt clean images here: true, or a seed", low=0)
    changing: int | None = setting(None, "let corruptions fade into each other: images at each step", low=1, later=True)
    outliers: str | None = setting(None, "mix in images of no known class: noise, or a data set", later=True,
                                   choices=(None, "noise", *DOMAINS, *CLEAN))  # fmt: skip
    outlier_ratio: float = setting(1.0, "outliers for each image of a known class", low=0, later=True)
    stream_speed: float | None = setting(None, "batches that arrive in the time of one prediction", low=0, later=True)
    limit: int | None = setting(None, "use at most so many images of each domain", low=1)
    transform: str = setting("unchanged", "how images are resized and cropped")


@dataclass(frozen=True, kw_only=True)
class Unit(StreamSettings):
    """One method on one stream, from the source model on: everything that its figures depend on, and no path.

    Files appear as the SHA-256 of their content, settings with all their values, so that equal keys mean equal work.
    """

    domains: tuple[str, ...]  # or corruptions, in the order in which they are streamed
    severities: tuple[int, ...] = ()
    part: str = "whole"  # or of DomainBed's split of each domain: `inside`, `outside`
    holdout: float = 0.2  # fraction of a domain that is outside
    files: Mapping[str, str] = field(default_factory=dict)  # the data set's `images` and `classes`, by their content
    protocol: str = "reset_each_shift"
    seed: int  # of the split, the order of the stream, and the method's own random numbers
    weights: str  # SHA-256 of the file of the source weights
    trained_on: tuple[str, ...] = ()  # source domains, if the network was trained on some domains of the data set
    method: str
    settings: Settings = field(default_factory=dict)
    source: SourceData | None = None

    def __post_init__(self) -> None:
        """Check nothing: units are made by the thousand, of sections that were checked."""

    @cached_property
    def key(self) -> str:
        """The name of the unit's folder."""
        others = {name: value for name, value in self.settings.items() if name != "mixed_only"}
        settings = _keyed(kind_of(self.method).settings_class, others)
        record = {"format": 1, **_keyed(Unit, self.record()), "settings": settings}
        if self.settings.get("norm") == "auto":
            record["norm_rule"] = 4  # 3: it follows the shift; 4: a single batch may show that it is not mixed
        elif self.settings.get("mixed_only"):
            record["mixed_only"] = True  # runs from before this setting are of the paper's rule, without it
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
        source = SourceData(**with_tuples(record["source"])) if record.get("source") else None
        return cls(**{**with_tuples(record), "source": source})


@dataclass(frozen=True)
class Candidate:
    """One choice of settings: the units that judge it, and the unit that it is for."""

    values: Mapping[str, Any]
    target: Unit
    validation: tuple[Unit, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a method on a stream with a seed, and its candidates (one: nothing to choose)."""

    section: str
    label: str
    seed: int
    candidates: tuple[Candidate, ...]
    source: str | None = None  # the only one, where a table has a column for each pair of source and target
    oracle: bool = False  # run every candidate on the target too, to show what the best one would have reached

    def units(self) -> list[Unit]:
        """Return every unit that may have to run for this cell."""
        return [unit for candidate in self.candidates for unit in (*candidate.validation, candidate.target)]


def with_tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file holds with tuples for its lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


kind_of = cache(get_method)  # a large grid asks for the same few many thousand times


def settings_of(method: str) -> list[str]:
    """Return the names of a method's settings."""
    return [f.name for f in dataclasses.fields(kind_of(method).settings_class)]


def resolved_settings(method: str, values: Settings) -> dict[str, Any]:
    """Return every setting of a method with its value, given some of them; plain data only."""
    resolved = dict(vars(make_settings(kind_of(method).settings_class, repr(method), values)))
    for name, value in resolved.items():
        if callable(value):
            raise SettingError(f"{method}: {name} is a function, which an experiment's record cannot hold")
    return resolved


def _keyed(kind: type[Any], values: Settings) -> dict[str, Any]:
    """Return values as the key knows them: renamed ones by their former name, later ones where they matter."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    keyed = {}
    for name, value in values.items():
        facts = known[name].metadata if name in known else {}
        if not (facts.get("later") and value == known[name].default):
            keyed[facts.get("formerly") or name] = value
    return keyed
