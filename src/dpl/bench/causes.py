"""The nine usual causes of "your numbers differ from theirs", with what a row of an experiment file has for each."""

from functools import cache
from pathlib import Path
from typing import Any

from dpl.backbones import OWN, Normalized, create
from dpl.bench.grid import fixed_settings, searched_settings
from dpl.bench.section import LEAVE_ONE_OUT, SHIPPED, MethodEntry, Section, read_sections
from dpl.bench.unit import Unit, resolved_settings
from dpl.core.errors import SettingError, did_you_mean
from dpl.streams import PROTOCOLS

__all__ = ["causes_of_difference"]


def causes_of_difference(file: str, row: str) -> dict[str, str]:
    """Return the causes with what the row has; where sections differ, each value stands with its section."""
    shipped = [path.stem for path in SHIPPED.glob("*.yaml")]
    if not Path(file).is_file() and Path(file).stem not in shipped:
        raise SettingError(f"--paper {file}: no such experiment file. {did_you_mean(file, shipped)}")
    _, sections = read_sections(Path(file))
    found = {s.name: _facts(s, entry) for s in sections for entry in s.methods if entry.label == row}
    if not found:
        labels = {entry.label for section in sections for entry in section.methods}
        raise SettingError(f"--row {row}: not a row of {file}. {did_you_mean(row, labels)}")
    causes: dict[str, str] = {}
    for cause in next(iter(found.values())):
        told = {f"{section}: {facts[cause]}": facts[cause] for section, facts in found.items()}
        values = set(told.values())
        causes[cause] = "; ".join(told if len(values) > 1 else values)
    return causes


def _facts(section: Section, entry: MethodEntry) -> dict[str, str]:
    settings = resolved_settings(entry.method, fixed_settings(section, entry))
    rate: dict[str, Any] = {name: settings[name] for name in ("lr", "optimizer", "steps") if name in settings}
    rate |= {name: f"chosen from {list(values)}" for name, values in searched_settings(section, entry).items()}
    rate = {"batch size": entry.batch_size or section.batch_size, **rate}
    protocol = PROTOCOLS.get(section.protocol, PROTOCOLS["reset_each_shift"])  # the others are leave-one-out and such
    part = f"{1 - Unit.holdout:.0%} of the target domain" if section.protocol == LEAVE_ONE_OUT else "all"
    images = f"those listed in {section.images}" if section.images else part
    scope = f"scope={settings['scope']!r}" if "scope" in settings else "no training"
    network = section.network
    origin = "torchvision" if network.startswith("torchvision/") else "your own code" if ":" in network else "timm"
    origin = "dpl.backbones" if network in OWN else origin
    return {
        "weights of timm or torchvision": f"{network} of {origin}, file {section.weights}",
        "normalisation": _normalisation(network),
        "5,000 or 50,000 images": images + (f", at most {section.limit:,} of each domain" if section.limit else ""),
        "error or accuracy": f"online accuracy in percent, mean over seeds {', '.join(map(str, section.seeds))}",
        "reset or continual": f"{section.protocol}: {protocol.summary}",
        "output before or after": f"{settings.get('output', 'before')} the update",
        "batch size against learning rate": ", ".join(f"{name} {value}" for name, value in rate.items()),
        "order": f"{'class-correlated' if protocol.correlated else 'shuffled'}, generator {section.order}, by the seed",
        "BN mode": f"norm={settings['norm']!r}, {scope}",
    }


@cache
def _normalisation(name: str) -> str:
    network = create(name)
    if not isinstance(network, Normalized):
        return "none inside the network"
    mean, std = ([round(float(value), 4) for value in values.flatten()] for values in (network.mean, network.std))
    return f"inside the network: mean {mean}, deviation {std}"
