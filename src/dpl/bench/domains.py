"""Data sets of an experiment, by what their domains are."""

from dpl.data.facts import CORRUPTIONS, DOMAIN_FOLDERS, DOMAINNET126_COUNTS, EXTRA_CORRUPTIONS
from dpl.data.imagenet_variants import IMAGENET_VARIANTS
from dpl.data.sets import normalise_name

__all__ = ["CLEAN", "CORRUPTED", "DOMAINS", "FOLDER", "known_domains"]

_FOLDERS = ("pacs", "vlcs", "office_home", "terra_incognita")
DOMAINS = {name: tuple(DOMAIN_FOLDERS[normalise_name(name)].counts) for name in _FOLDERS}
DOMAINS["domainnet126"] = tuple(DOMAINNET126_COUNTS)
FOLDER = "folder"  # images in class folders; its domains are paths below the data folder
CORRUPTED = ("cifar10_c", "cifar100_c", "imagenet_c")
CLEAN = {"imagenet": "val"} | dict.fromkeys(("cifar10", "cifar100", "cifar10_1", *IMAGENET_VARIANTS), "test")


def known_domains(dataset: str, corrupted: bool) -> tuple[str, ...]:
    """Return the names that a data set's domains can have."""
    if dataset in DOMAINS:
        return DOMAINS[dataset]
    return (*CORRUPTIONS, *EXTRA_CORRUPTIONS) if corrupted or dataset in CORRUPTED else (CLEAN[dataset],)
