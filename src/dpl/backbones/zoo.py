"""Networks by name: built in, of timm, `torchvision/<name>`, `package.module:build`, an entry point, or a folder."""

from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from dpl.backbones.normalise import Normalise, with_normalisation
from dpl.backbones.pretrained import build_pretrained, holds_weights, is_pretrained_folder
from dpl.backbones.records import OWN
from dpl.backbones.weights import load_weights
from dpl.core.errors import MissingExtraError, SettingError, did_you_mean
from dpl.core.extras import entry_points, import_object, optional

__all__ = ["available", "create"]

_TORCHVISION = "torchvision/"
_GROUP = "dpl.backbones"  # of entry points


def create(
    name: str,
    *,
    num_classes: int | None = None,
    weights: str | Path | None = None,
    normalise: Normalise | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """Return the network called `name`, in evaluation mode, for images in [0, 1].

    The normalisation is the network's first layer: `imagenet`, `cifar`, a pair (mean, std) or `none`; by default the
    one it was trained with. `weights` is a checkpoint file, loaded strictly by name (see `load_weights`);
    `pretrained=True` lets timm or torchvision download their weights instead. Without either, the weights are random.
    `num_classes` defaults to that of the published weights. `package.module:build` calls `build(num_classes=...)`, a
    function of your own; so does the name of an entry point in the group `dpl.backbones`. A folder that transformers
    wrote holds a network with its weights, its normalisation and its number of classes.
    """
    if num_classes is not None and num_classes < 1:
        raise SettingError(f"num_classes={num_classes}: expected 1 or more.")
    if pretrained and weights is not None:
        raise SettingError("pretrained=True and weights= exclude each other; give one of them.")
    network, default = _build(name, num_classes, pretrained)
    network = with_normalisation(network, default if normalise is None else normalise)
    if weights is not None and not holds_weights(name, weights):
        load_weights(network, weights)
    return network.eval()


def available(pattern: str = "*") -> list[str]:
    """Return the names for `create` that match `pattern`, such as `resnet*`: the built-in networks first.

    Names of timm and torchvision are included if those packages are installed.
    """
    names = [*OWN, *entry_points(_GROUP)]
    for others in (_timm_names, _torchvision_names):
        with suppress(MissingExtraError):
            names += others()
    return [name for name in names if fnmatchcase(name, pattern)]


def _build(name: str, num_classes: int | None, pretrained: bool) -> tuple[nn.Module, Normalise]:
    """Return the network without normalisation, and its default normalisation."""
    if name in OWN:
        return _build_own(name, num_classes, pretrained)
    if is_pretrained_folder(name):
        return build_pretrained(Path(name), num_classes)
    sizes = {} if num_classes is None else {"num_classes": num_classes}
    if ":" in name or name in entry_points(_GROUP):
        return _build_imported(name, sizes, pretrained), "none"
    if name.startswith(_TORCHVISION):
        return _build_torchvision(name, sizes, pretrained), "imagenet"
    return _build_timm(name, sizes, pretrained)


def _build_own(name: str, num_classes: int | None, pretrained: bool) -> tuple[nn.Module, Normalise]:
    record = OWN[name]
    if pretrained:
        origin = record.checkpoints or "your own training: no weights are published"
        raise SettingError(f"pretrained=True: {name} is never downloaded; pass weights=<file> (from {origin}).")
    return record.build(num_classes or record.classes), record.normalise


def _build_imported(name: str, sizes: dict[str, int], pretrained: bool) -> nn.Module:
    """Call the function that a path or an entry point names; it gets `num_classes` if that is known."""
    build = import_object(name) if ":" in name else entry_points(_GROUP)[name].load()
    if pretrained:
        raise SettingError(f"pretrained=True: {name} is a network of your own; pass weights=<file>.")
    if not callable(build):
        raise SettingError(f"{name} is {type(build).__name__}: expected a function or class that makes a network.")
    network = build(**sizes)
    if not isinstance(network, nn.Module):
        raise SettingError(f"{name} returned {type(network).__name__}: expected a torch.nn.Module.")
    return network


def _build_torchvision(name: str, sizes: dict[str, int], pretrained: bool) -> nn.Module:
    models = optional("torchvision.models", "bench")
    if name not in _torchvision_names():
        raise _unknown(name)
    weights = "DEFAULT" if pretrained else None
    try:
        network: nn.Module = models.get_model(name.removeprefix(_TORCHVISION), weights=weights, **sizes)
    except ValueError as error:
        raise SettingError(f"{name} cannot be built with num_classes={sizes.get('num_classes')}: {error}") from error
    return network


def _build_timm(name: str, sizes: dict[str, int], pretrained: bool) -> tuple[nn.Module, Normalise]:
    timm = optional("timm", "bench")
    if not timm.is_model(name):
        raise _unknown(name)
    network: nn.Module = timm.create_model(name, pretrained=pretrained, **sizes)
    trained: Any = network.pretrained_cfg
    return network, (trained["mean"], trained["std"])


def _timm_names() -> list[str]:
    return list(optional("timm", "bench").list_models())


def _torchvision_names() -> list[str]:
    models = optional("torchvision.models", "bench")
    return [_TORCHVISION + name for name in models.list_models(module=models)]


def _unknown(name: str) -> SettingError:
    near = did_you_mean(name, available(), otherwise=f"Built in: {', '.join(OWN)}.")
    return SettingError(f"network {name!r} is unknown. {near} dpl.backbones.available() lists all.")
