"""From an experiment file to cells: every method on every stream with every seed, and the weights that belong to it."""

import dataclasses
import string
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from dpl.backbones.pretrained import WEIGHTS, is_pretrained_folder
from dpl.bench.context import BenchContext
from dpl.bench.domains import CORRUPTED, DOMAINS, FOLDER, known_domains
from dpl.bench.section import BY_DOMAIN, LEAVE_ONE_OUT, SINGLE_SOURCE, MethodEntry, Section, read_sections, within
from dpl.bench.unit import Candidate, Cell, SourceData, StreamSettings, Unit, kind_of, resolved_settings, settings_of
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.files import read_json
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


def read_grid(path: Path, context: BenchContext, *, limit: int | None = None) -> ExperimentGrid:
    """Read an experiment file; `limit` bounds the images of each domain."""
    title, sections = read_sections(path)
    bounded = [s if limit is None else replace(s, limit=min(limit, s.limit or limit)) for s in sections]
    with within(str(path)):
        cells = [cell for section in bounded for cell in section_cells(section, context)]
    return ExperimentGrid(title, tuple(bounded), tuple(cells), context.files)


def section_cells(section: Section, context: BenchContext, lacking: dict[str, DataError] | None = None) -> list[Cell]:
    """Return the cells of one section: each method with each seed on each stream.

    With `lacking`, a stream without its source weights is noted there, and the others are returned.
    """
    with within(section.name):
        streams = []
        for stream in _streams(section, context):
            try:
                weights = _weights(section, stream, context)
                streams.append(replace(stream, weights=context.digest(weights)))
            except DataError as error:
                if lacking is None:
                    raise
                source = _only_source(section, stream)
                pair = f"{source}->{_target(stream)}" if source else _target(stream)
                lacking[f"{pair} seed {stream.seed}"] = error
        return [_cell(section, entry, stream) for entry in section.methods for stream in streams]


def _target(stream: Unit) -> str:
    return stream.domains[0] if len(stream.domains) == 1 else "all"


def _only_source(section: Section, stream: Unit) -> str | None:
    return stream.trained_on[0] if section.protocol == SINGLE_SOURCE else None


def _streams(section: Section, context: BenchContext) -> Iterator[Unit]:
    """Yield the streams of a section with each seed, as units of the source model whose weights are still unknown."""
    shared = {f.name: getattr(section, f.name) for f in dataclasses.fields(StreamSettings)}
    lists = {name: getattr(section, name) for name in ("images", "classes") if getattr(section, name)}
    shared["files"] = {name: context.digest(context.find(value)) for name, value in lists.items()}
    streams = _domain_streams if section.protocol in BY_DOMAIN else _shift_streams
    for seed, own in product(section.seeds, [*streams(section)]):
        yield Unit(**shared, **own, seed=seed, weights="", method="source")


def _domain_streams(section: Section) -> Iterator[dict[str, Any]]:
    """Yield what the units of each target have, of each source if there is one at a time."""
    known, single = DOMAINS[section.dataset], section.protocol == SINGLE_SOURCE
    sources = choose_domains(section.dataset, section.sources, known) if single else [None]
    for source, target in product(sources, choose_domains(section.dataset, section.targets, known)):
        others = (source,) if source else tuple(name for name in known if name != target)
        if target != source:
            yield {"domains": (target,), "trained_on": others, "part": "whole" if single else "inside"}


def _shift_streams(section: Section) -> Iterator[dict[str, Any]]:
    """Yield what the units of a stream have, of one for each domain if the model is reset at every domain."""
    protocol = PROTOCOLS[section.protocol]
    corrupted = section.corrupt is not None or section.dataset in CORRUPTED
    known = section.domains or () if section.dataset == FOLDER else known_domains(section.dataset, corrupted)
    usual = CORRUPTIONS if corrupted else known
    # one by one, because choose_domains would put them into the order of the known ones
    names = tuple(choose_domains(section.dataset, [name], known)[0] for name in section.domains or usual)
    severities = (1, 2, 3, 4, 5) if protocol.walk == "gradual" else section.severities if corrupted else ()
    whole = {"protocol": section.protocol, "domains": names, "severities": severities}
    if protocol.reset != "each":
        yield whole
        return
    for level, name in product(severities or (None,), names):
        yield whole | {"domains": (name,), "severities": () if level is None else (level,)}


def _cell(section: Section, entry: MethodEntry, stream: Unit) -> Cell:
    fixed, grid = {"seed": stream.seed} | fixed_settings(section, entry), searched_settings(section, entry)
    unit = replace(stream, method=entry.method, batch_size=entry.batch_size or section.batch_size)
    unit = replace(unit, source=_source(section, entry, unit))
    choices = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]  # the last varies fastest
    built = []
    for values in choices:
        target = replace(unit, settings=resolved_settings(entry.method, {**fixed, **values}))
        held_out = replace(target, part="outside", protocol="reset_each_shift")
        judges = [replace(held_out, domains=(domain,)) for domain in unit.trained_on] if len(choices) > 1 else []
        built.append(Candidate(values, target, tuple(judges)))
    source, oracle = _only_source(section, stream), section.oracle and len(built) > 1
    return Cell(section.name, entry.label, unit.seed, tuple(built), source, oracle)


def fixed_settings(section: Section, entry: MethodEntry) -> dict[str, Any]:
    """Return what is set for a method: what it has of the section's settings, then its own."""
    names = settings_of(entry.method)
    return {name: value for name, value in section.settings.items() if name in names} | dict(entry.settings)


def searched_settings(section: Section, entry: MethodEntry) -> Mapping[str, tuple[Any, ...]]:
    """Return what is searched for a method: its own grid, or the section's without what is fixed for it."""
    if not section.selection:
        return {}
    if entry.grid is not None:
        return entry.grid
    names = set(settings_of(entry.method)).difference(entry.settings)
    return {name: values for name, values in section.selection.items() if name in names}


def _weights(section: Section, stream: Unit, context: BenchContext) -> Path:
    """Return the path of the source weights; weights that `dpl train` made must fit the experiment."""
    words = {
        "weights": context.weights, "data": context.data, "dataset": section.dataset, "network": section.network,
        "target": _target(stream), "source": _only_source(section, stream) or "", "seed": stream.seed,
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
    if stream.trained_on and (path.parent / "train.json").is_file():
        _check_training(path, section, stream)
    return path


def _check_training(weights: Path, section: Section, stream: Unit) -> None:
    """Refuse weights that `dpl train` made for another experiment: they may know the target or its held-out images."""
    path, leave_one_out = weights.parent / "train.json", section.protocol == LEAVE_ONE_OUT
    wanted: dict[str, Any] = {"network": section.network, "dataset": section.dataset}
    wanted |= {"target": _target(stream) if leave_one_out else None, "source": _only_source(section, stream)}
    if leave_one_out or section.selection:  # held-out or training images are used by the split
        wanted["trial_seed"] = stream.seed
    found = read_json(path).get("settings")
    if not isinstance(found, dict) or not wanted.keys() <= found.keys():
        raise DataError(f"{path}: damaged, it does not name {', '.join(wanted)}; train the source model again")
    for key, value in wanted.items():
        if normalise_name(str(found[key])) != normalise_name(str(value)):
            raise DataError(
                f"{weights} was trained with {key}={found[key]!r}; this experiment needs {key}={value!r}. Train it "
                "so, or change the experiment"
            )


def _source(section: Section, entry: MethodEntry, unit: Unit) -> SourceData | None:
    """Return which source images a method sees, None for those that need none."""
    if kind_of(entry.method).info.source == "never":
        return None
    values: dict[str, Any] = {"dataset": section.dataset, "batch_size": unit.batch_size}
    if section.source is not None:
        values |= section.source
    elif section.protocol in BY_DOMAIN:
        values |= {"domains": unit.trained_on, "part": unit.part}
    else:
        raise SettingError(
            f"{entry.label} needs source images: add source: {{dataset: ..., split: train}}, or source: rest for clean "
            "images that are not in the stream"
        )
    return SourceData(**values)
