"""The nine usual causes of "your numbers differ from theirs", with what a row of an experiment file has for each."""

from functools import cache
from pathlib import Path
from typing import Any

from dpl.backbones import OWN, create
from dpl.backbones.normalise import Normalized
from dpl.bench.grid import searched_settings
from dpl.bench.section import LEAVE_ONE_OUT, SHIPPED, MethodEntry, Section, read_sections, shipped_or
from dpl.bench.unit import resolved_settings
from dpl.core.errors import SettingError, did_you_mean
from dpl.core.settings import describe
from dpl.methods import get_method
from dpl.streams import PROTOCOLS

__all__ = ["causes_of_difference"]


def causes_of_difference(file: str, row: str) -> dict[str, str]:
    """Return the causes with what the row has; where sections differ, each value stands with its section."""
    if not shipped_or(Path(file)).is_file():
        known = [path.stem for path in SHIPPED.glob("*.yaml")]
        raise SettingError(f"--paper {file}: no such experiment file. {did_you_mean(file, known)}")
    _, sections = read_sections(Path(file))
    found = {s.name: _facts(s, entry) for s in sections for entry in s.methods if entry.label == row}
    if not found:
        labels = {entry.label for section in sections for entry in section.methods}
        raise SettingError(f"--row {row}: not a row of {file}. {did_you_mean(row, labels)}")
    causes = next(iter(found.values()))
    return {cause: _merged({name: facts[cause] for name, facts in found.items()}) for cause in causes}


def _merged(values: dict[str, str]) -> str:
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{section}: {value}" for section, value in values.items())


def _facts(section: Section, entry: MethodEntry) -> dict[str, str]:
    names = [name for name, _, _ in describe(get_method(entry.method).settings_class)]
    common = {name: value for name, value in section.settings.items() if name in names}
    settings = resolved_settings(entry.method, {**common, **entry.settings})
    rate: dict[str, Any] = {name: settings[name] for name in ("lr", "optimizer", "steps") if name in settings}
    rate |= {name: f"chosen from {list(values)}" for name, values in searched_settings(section, entry, names).items()}
    protocol = PROTOCOLS.get(section.protocol, PROTOCOLS["reset_each_shift"])  # the others are leave-one-out and such
    return {
        "weights of timm or torchvision": f"{section.network} of {_origin(section.network)}, file {section.weights}",
        "normalisation": _normalisation(section.network),
        "5,000 or 50,000 images": _images(section),
        "error or accuracy": f"online accuracy in percent, mean over seeds {', '.join(map(str, section.seeds))}",
        "reset or continual": f"{section.protocol}: {protocol.summary}",
        "output before or after": f"{settings.get('output', 'before')} the update",
        "batch size against learning rate": ", ".join(
            [f"batch size {entry.batch_size or section.batch_size}", *(f"{name} {rate[name]}" for name in rate)]
        ),
        "order": f"{'class-correlated' if protocol.correlated else 'shuffled'}, generator {section.order}, by the seed",
        "BN mode": f"norm={settings['norm']!r}, "
        + (f"scope={settings['scope']!r}" if "scope" in settings else "no training"),
    }


def _origin(network: str) -> str:
    if network in OWN:
        return "dpl.backbones"
    return "torchvision" if network.startswith("torchvision/") else "your own code" if ":" in network else "timm"


@cache
def _normalisation(name: str) -> str:
    network = create(name)
    if not isinstance(network, Normalized):
        return "none inside the network"
    mean, std = ([round(float(value), 4) for value in values.flatten()] for values in (network.mean, network.std))
    return f"inside the network: mean {mean}, deviation {std}"


def _images(section: Section) -> str:
    part = f"{1 - section.holdout:.0%} of the target domain" if section.protocol == LEAVE_ONE_OUT else "all"
    chosen = f"those listed in {section.images}" if section.images else part
    return chosen + (f", at most {section.limit:,} of each domain" if section.limit else "")
