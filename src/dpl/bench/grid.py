"""From an experiment file to cells: every method on every stream with every seed, and the weights that belong to it."""

import dataclasses
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from dpl.backbones.pretrained import WEIGHTS, is_pretrained_folder
from dpl.bench.context import BenchContext
from dpl.bench.images import CLEAN, CORRUPTED, DOMAINS, FOLDER, known_domains
from dpl.bench.section import BY_DOMAIN, LEAVE_ONE_OUT, SINGLE_SOURCE, MethodEntry, Section, read_sections, within
from dpl.bench.unit import Candidate, Cell, SourceData, StreamSettings, Unit, method_kind, resolved_settings
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.data.facts import CORRUPTIONS
from dpl.data.sets import choose_domains, normalise_name
from dpl.streams import PROTOCOLS

__all__ = ["ExperimentGrid", "fixed_settings", "read_grid", "searched_settings", "section_cells"]


class ExperimentGrid(NamedTuple):
    """A file's experiments, in the order in which its tables list them."""

    title: str
    sections: tuple[Section, ...]
    cells: tuple[Cell, ...]
    files: Mapping[str, Path]

    def units(self) -> list[Unit]:
        """Return every unit that may have to run, each once."""
        return list({unit.key: unit for cell in self.cells for unit in cell.units()}.values())


class _Stream(NamedTuple):
    """What all methods of a section meet: the target, the only source domain if there is one, the source model."""

    target: str
    source: str | None
    unit: Unit


def read_grid(source: Path | Mapping[str, Any], context: BenchContext, *, limit: int | None = None) -> ExperimentGrid:
    """Read an experiment file, or a mapping with the same keys; `limit` bounds the images of each domain."""
    title, sections = read_sections(source)
    bounded = [s if limit is None else replace(s, limit=min(limit, s.limit or limit)) for s in sections]
    with within(str(source) if isinstance(source, Path) else title):
        cells = [cell for section in bounded for cell in section_cells(section, context)]
    return ExperimentGrid(title, tuple(bounded), tuple(cells), context.files)


def section_cells(section: Section, context: BenchContext, lacking: dict[str, DataError] | None = None) -> list[Cell]:
    """Return the cells of one section: each method with each seed on each stream.

    With `lacking`, a stream without its source weights is noted there, and the others are returned.
    """
    with within(section.name):
        _check_section(section)
        streams = []
        for stream in _streams(section, context):
            try:
                weights = context.digest(_weights(section, stream, context))
                streams.append(stream._replace(unit=replace(stream.unit, weights=weights)))
            except DataError as error:
                if lacking is None:
                    raise
                pair = f"{stream.source}->{stream.target}" if stream.source else stream.target
                lacking[f"{pair} seed {stream.unit.seed}"] = error
        return [_cell(section, entry, stream) for entry in section.methods for stream in streams]


def _check_section(section: Section) -> None:
    """Refuse keys that the protocol or the data set would silently ignore."""
    by_domain = section.protocol in BY_DOMAIN
    resets = by_domain or PROTOCOLS[section.protocol].reset == "each"
    conflicts = [
        (section.holdout in (0, 1),
         f"holdout={section.holdout}: expected a fraction between 0 and 1, without both ends"),
        (by_domain and section.dataset not in DOMAINS,
         f"protocol {section.protocol}: needs a data set of domains, {section.dataset} is not"),
        (section.dataset == FOLDER and not section.domains,
         "dataset: folder needs domains: [path below the data folder]"),
        (section.selection and not by_domain,
         "selection: needs source domains, so protocol: leave_one_domain_out or single_source"),
        (section.oracle and not section.selection, "oracle: has no effect without selection"),
        (section.targets and not by_domain, "targets: this protocol names its streams by domains"),
        (section.sources and section.protocol != SINGLE_SOURCE, "sources: for protocol: single_source"),
        (section.domains and by_domain, "domains: this protocol names its streams by targets"),
        (section.corrupt is not None and section.dataset not in CLEAN,
         f"corrupt: {section.dataset} is not a set of clean images ({', '.join(CLEAN)})"),
        (section.source == "rest" and section.corrupt is None,
         "source: rest is for clean images that are corrupted here"),
        (section.outliers == section.dataset, "outliers: expected another data set than the stream's, or noise"),
        (section.outliers and section.corrupt is not None and not resets,
         "outliers: are corrupted as the stream is; use a protocol that resets at each corruption"),
    ]  # fmt: skip
    for is_wrong, message in conflicts:
        if is_wrong:
            raise SettingError(message)
    valid = {name for entry in section.methods for name in _setting_names(entry.method)}
    for name in [name for name in (*section.settings, *(section.selection or {})) if name not in valid]:
        raise SettingError(f"settings: no method here has {name!r}. {did_you_mean(name, valid)}")


def _setting_names(method: str) -> list[str]:
    return [f.name for f in dataclasses.fields(method_kind(method).settings_class)]


def _streams(section: Section, context: BenchContext) -> Iterator[_Stream]:
    """Yield the streams of a section with each seed, as units of the source model whose weights are still unknown."""
    shared = {f.name: getattr(section, f.name) for f in dataclasses.fields(StreamSettings)}
    lists = {name: getattr(section, name) for name in ("images", "classes") if getattr(section, name)}
    shared["files"] = {name: context.digest(context.find(value)) for name, value in lists.items()}
    streams = _domain_streams if section.protocol in BY_DOMAIN else _shift_streams
    for seed in section.seeds:
        for target, source, own in streams(section):
            yield _Stream(target, source, Unit(**shared, **own, seed=seed, weights="", method="source"))


def _domain_streams(section: Section) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """Yield each target with its source, and the fields of its unit."""
    known, single = DOMAINS[section.dataset], section.protocol == SINGLE_SOURCE
    sources = choose_domains(section.dataset, section.sources, known) if single else [None]
    for source, target in product(sources, choose_domains(section.dataset, section.targets, known)):
        others = (source,) if source else tuple(name for name in known if name != target)
        if target != source:
            yield target, source, {"domains": (target,), "trained_on": others, "part": "whole" if single else "inside"}


def _shift_streams(section: Section) -> Iterator[tuple[str, None, dict[str, Any]]]:
    """Yield one stream, or one for each domain if the model is reset at every domain."""
    protocol = PROTOCOLS[section.protocol]
    corrupted = section.corrupt is not None or section.dataset in CORRUPTED
    known = section.domains or () if section.dataset == FOLDER else known_domains(section.dataset, corrupted)
    usual = CORRUPTIONS if corrupted else known
    # one by one, because choose_domains would put them into the order of the known ones
    names = tuple(choose_domains(section.dataset, [name], known)[0] for name in section.domains or usual)
    severities = (1, 2, 3, 4, 5) if protocol.walk == "gradual" else section.severities if corrupted else ()
    shared = {"protocol": section.protocol}
    if protocol.reset != "each":
        yield "all", None, shared | {"domains": names, "severities": severities}
        return
    for level, name in product(severities or (None,), names):
        yield name, None, shared | {"domains": (name,), "severities": () if level is None else (level,)}


def _cell(section: Section, entry: MethodEntry, stream: _Stream) -> Cell:
    fixed = {"seed": stream.unit.seed} | fixed_settings(section, entry)
    unit = replace(stream.unit, method=entry.method, batch_size=entry.batch_size or section.batch_size)
    unit = replace(unit, source=_source(section, entry, unit))
    grid = searched_settings(section, entry)
    choices = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]  # the last varies fastest
    built = []
    for values in choices:
        target = replace(unit, settings=resolved_settings(entry.method, {**fixed, **values}))
        held_out = replace(target, part="outside", protocol="reset_each_shift")
        judges = [replace(held_out, domains=(domain,)) for domain in unit.trained_on] if len(choices) > 1 else []
        built.append(Candidate(values, target, tuple(judges)))
    return Cell(section.name, entry.label, unit.seed, tuple(built), stream.source, section.oracle and len(built) > 1)


def fixed_settings(section: Section, entry: MethodEntry) -> dict[str, Any]:
    """Return what is set for a method: what it has of the section's settings, then its own."""
    names = _setting_names(entry.method)
    return {name: value for name, value in section.settings.items() if name in names} | dict(entry.settings)


def searched_settings(section: Section, entry: MethodEntry) -> dict[str, tuple[Any, ...]]:
    """Return what is searched for a method: its own grid, or the section's without what is fixed for it."""
    if section.selection is None or not entry.selection:
        return {}
    if entry.grid is not None:
        return dict(entry.grid)
    names = set(_setting_names(entry.method)).difference(entry.settings)
    return {name: values for name, values in section.selection.items() if name in names}


def _weights(section: Section, stream: _Stream, context: BenchContext) -> Path:
    """Return the path of the source weights; weights that `dpl train` made must fit the experiment."""
    words = {
        "weights": context.weights, "data": context.data, "dataset": section.dataset, "network": section.network,
        "target": stream.target, "source": stream.source or "", "seed": stream.unit.seed,
    }  # fmt: skip
    for _, name, _, _ in string.Formatter().parse(section.weights):
        if name is not None and name not in words:
            raise SettingError(f"weights: unknown word {{{name}}}. {did_you_mean(name, words)}")
    path = Path(section.weights.format_map(words))
    if not path.is_file():
        advice = "`dpl train` makes them, --weights names their folder"
        for folder in filter(is_pretrained_folder, (path, context.weights)):
            advice = f"{folder} is a model of transformers: write `network: {folder}` and `weights: {folder / WEIGHTS}`"
        raise DataError(f"no source weights at {path}; {advice}")
    if stream.unit.trained_on and (path.parent / "train.json").is_file():
        _check_training(path, section, stream)
    return path


def _check_training(weights: Path, section: Section, stream: _Stream) -> None:
    """Compare with the `train.json` that `dpl train` leaves beside its weights.

    A model trained on the target, or whose held-out images were others, would give figures that are worth nothing.
    """
    path, leave_one_out = weights.parent / "train.json", section.protocol == LEAVE_ONE_OUT
    wanted: dict[str, Any] = {"network": section.network, "dataset": section.dataset}
    wanted |= {"target": stream.target if leave_one_out else None, "source": stream.source}
    if leave_one_out or section.selection:  # held-out or training images are used by the split
        wanted["trial_seed"] = stream.unit.seed
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        found = {key: settings[key] for key in wanted}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); train the source model again") from error
    for key, value in wanted.items():
        if normalise_name(str(found[key])) != normalise_name(str(value)):
            raise DataError(
                f"{weights} was trained with {key}={found[key]!r}; this experiment needs {key}={value!r}. Train it "
                "so, or change the experiment"
            )


def _source(section: Section, entry: MethodEntry, unit: Unit) -> SourceData | None:
    """Return which source images a method sees, None for those that need none."""
    if method_kind(entry.method).info.source == "never":
        return None
    values: dict[str, Any] = {"dataset": section.dataset, "batch_size": unit.batch_size}
    if section.source == "rest":
        values["part"] = "rest"
    elif isinstance(section.source, Mapping):
        values |= section.source
    elif section.protocol in BY_DOMAIN:
        values |= {"domains": unit.trained_on, "part": unit.part}
    else:
        raise SettingError(
            f"{entry.label} needs source images: add source: {{dataset: ..., split: train}}, or source: rest for clean "
            "images that are not in the stream"
        )
    return SourceData(**values)
