"""Every benchmark by its name: `open_benchmark("pacs", folder)`."""

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from dpl.core.errors import SettingError, did_you_mean
from dpl.data.cifar import CIFAR10, CIFAR100, open_cifar, open_cifar10_1, open_cifar_c
from dpl.data.domainnet import open_domainnet126
from dpl.data.domains import open_domain_folders
from dpl.data.facts import DOMAIN_FOLDERS
from dpl.data.imagenet import open_imagenet, open_imagenet_c
from dpl.data.imagenet_variants import IMAGENET_VARIANTS, open_imagenet_variant
from dpl.data.sets import Benchmark, normalise_name

__all__ = ["list_benchmarks", "open_benchmark"]

_OPENERS: dict[str, Callable[..., Benchmark]] = {
    "pacs": partial(open_domain_folders, DOMAIN_FOLDERS["pacs"]),
    "vlcs": partial(open_domain_folders, DOMAIN_FOLDERS["vlcs"]),
    "office_home": partial(open_domain_folders, DOMAIN_FOLDERS["officehome"]),
    "terra_incognita": partial(open_domain_folders, DOMAIN_FOLDERS["terraincognita"]),
    "domainnet126": open_domainnet126,
    "cifar10_c": partial(open_cifar_c, CIFAR10),
    "cifar100_c": partial(open_cifar_c, CIFAR100),
    "imagenet_c": open_imagenet_c,
    "cifar10": partial(open_cifar, CIFAR10),
    "cifar100": partial(open_cifar, CIFAR100),
    "cifar10_1": open_cifar10_1,
    "imagenet": open_imagenet,
    **{name: partial(open_imagenet_variant, variant) for name, variant in IMAGENET_VARIANTS.items()},
}


def list_benchmarks() -> list[str]:
    """Return the names that `open_benchmark` knows."""
    return list(_OPENERS)


def open_benchmark(name: str, root: str | os.PathLike[str], **options: Any) -> Benchmark:
    """Open a published data set at `root`, or in its usual folder below `root`.

    Capitals, hyphens and underscores in `name` do not matter. Options depend on the benchmark: `domains` (those
    wanted), `severity` (1 to 5), `split` ("test" or "train"), `images` and `lists` (list files), `classes`.
    """
    opener = {normalise_name(key): value for key, value in _OPENERS.items()}.get(normalise_name(name))
    if opener is None:
        raise SettingError(f"unknown benchmark {name!r}. {did_you_mean(name, _OPENERS)}")
    parameters = inspect.signature(opener).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise SettingError(f"{name} has no option {option!r}. {did_you_mean(option, known)}")
    return opener(root, **options)
