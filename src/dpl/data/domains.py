"""PACS, VLCS, OfficeHome and TerraIncognita: one folder per domain, in it one per class."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpl.data.facts import DomainFolders
from dpl.data.folders import find_home, labelled_files, layout_error, shorten, sub_folders, warn_counts
from dpl.data.sets import Benchmark, DataWarning, Files, ImageSet, choose_domains, normalise_name

__all__ = ["open_domain_folders"]


def open_domain_folders(
    facts: DomainFolders, root: str | os.PathLike[str], *, domains: Sequence[str] | None = None
) -> Benchmark:
    """Open a benchmark laid out as `<domain>/<class>/<image>`, all of its domains or those named."""
    layout = _domain_layout(facts)
    home = find_home(root, facts.folders, lambda folder: bool(_domain_paths(facts, folder)), layout)
    paths, wanted = _domain_paths(facts, home), choose_domains(facts.name, domains, list(facts.counts))
    missing = [domain for domain in wanted if domain not in paths]
    if missing:
        raise layout_error(f"{home}: the domains {shorten(missing)} are missing", layout)
    sets = {domain: _read_domain(facts, home, paths[domain], domain) for domain in wanted}
    warn_counts(facts.name, {domain: len(images) for domain, images in sets.items()}, facts.counts, facts.note)
    return Benchmark(facts.name, sets, facts.classes)


def _domain_layout(facts: DomainFolders) -> str:
    lines = [f"  {facts.folders[0]}/"]
    for domain in facts.counts:
        lines.append(f"    {domain}/")
        lines.append(f"      {facts.classes[0]}/*.jpg, {facts.classes[1]}/*.jpg, ... ({len(facts.classes)} classes)")
    return "\n".join(lines)


def _domain_paths(facts: DomainFolders, home: Path) -> dict[str, Path]:
    """Map the domains that have a folder here to it, under any of their names."""
    present = {normalise_name(folder): folder for folder in sub_folders(home)}
    paths: dict[str, Path] = {}
    for domain in facts.counts:
        for name in (domain, *facts.aliases.get(domain, ())):
            if normalise_name(name) in present:
                paths.setdefault(domain, home / present[normalise_name(name)])
    return paths


def _read_domain(facts: DomainFolders, home: Path, folder: Path, domain: str) -> ImageSet:
    present = {normalise_name(name): name for name in sub_folders(folder)}
    missing = [name for name in facts.classes if normalise_name(name) not in present]
    if missing:
        raise layout_error(f"{folder}: the class folders {shorten(missing)} are missing", _domain_layout(facts))
    labels = {present.pop(normalise_name(name)): label for label, name in enumerate(facts.classes)}
    if present:
        text = f"{folder}: {shorten(present.values())} left out: no class of {facts.name}"
        warnings.warn(text, DataWarning, stacklevel=4)
    names, found = labelled_files(home, folder, labels)
    return ImageSet(f"{facts.name}/{domain}", facts.classes, np.array(found), Files(home, tuple(names), as_stored=True))
