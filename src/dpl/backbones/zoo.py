"""Networks by name: built in, of timm, `torchvision/<name>`, `package.module:build`, an entry point, or a folder."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from dpl.backbones.cifar import CifarResNet, DebugCNN, ResNeXt29, WideResNet, WideStemResNet
from dpl.backbones.normalise import Normalise, with_normalisation
from dpl.backbones.pretrained import build_pretrained, holds_weights, is_pretrained_folder
from dpl.backbones.weights import load_weights
from dpl.core.errors import MissingExtraError, SettingError, did_you_mean
from dpl.core.extras import entry_points, import_object, optional

__all__ = ["OWN", "NetworkRecord", "available", "create"]

_TORCHVISION = "torchvision/"
_GROUP = "dpl.backbones"  # of entry points
# Closer to the deviation within an image than over all pixels, but many CIFAR-10 networks were trained with it.
_CIFAR_SMALL_STD = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CIFAR100 = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


class NetworkRecord(NamedTuple):
    """A built-in network."""

    build: Callable[[int], nn.Module]  # for a number of classes, without normalisation
    classes: int  # by default
    input_size: int  # side of the images, in pixels, that its checkpoints were trained with
    normalise: Normalise
    checkpoints: str = ""  # source of weight files with these parameter names; empty if there are none


def _bottleneck_resnet50(num_classes: int) -> nn.Module:
    """Return AdaContrast's ResNet-50: a bottleneck 2048 -> 256 with BN, a classifier of directions times lengths."""
    resnet: nn.Module = optional("torchvision", "bench").models.resnet50(weights=None)
    resnet.fc = nn.Linear(2048, 256)
    encoder = nn.Sequential(resnet, nn.BatchNorm1d(256))
    return nn.Sequential(OrderedDict(encoder=encoder, fc=weight_norm(nn.Linear(256, num_classes), dim=0)))


OWN: dict[str, NetworkRecord] = {
    "wrn28_10": NetworkRecord(partial(WideResNet, 10), 10, 32, "none",
                              "RobustBench, CIFAR-10 corruptions, Standard.pt"),
    "wrn28_1": NetworkRecord(partial(WideResNet, 1, stage="layer", head="linear"), 10, 32, _CIFAR_SMALL_STD,
                             "files with the names layer1..3.layer.N and linear"),
    "resnext29": NetworkRecord(ResNeXt29, 100, 32, _HALF,
                               "RobustBench, CIFAR-100 corruptions, Hendrycks2020AugMix_ResNeXt.pt"),
    **{f"cifar_resnet{depth}": NetworkRecord(partial(CifarResNet, (depth - 2) // 6), 10, 32, "imagenet",
                                             f"akamaster/pytorch_resnet_cifar10, resnet{depth}.th")
       for depth in (20, 32, 44, 56, 110)},
    "cifar100_resnet32": NetworkRecord(WideStemResNet, 100, 32, _CIFAR100,
                                       "files with a stem of 64 channels and 256 features"),
    "domainnet126_resnet50": NetworkRecord(_bottleneck_resnet50, 126, 224, "imagenet",
                                           "AdaContrast (Chen et al., 2022), best_<domain>_<seed>.pth.tar"),
    "debug_cnn": NetworkRecord(DebugCNN, 10, 32, "none"),
}  # fmt: skip
"""The built-in networks by name; docs/networks.md has their sizes and accuracies."""


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
    """Return the names that `create` knows and `pattern` matches: built in, then timm's and torchvision's if there."""
    names = [*OWN, *entry_points(_GROUP)]
    with suppress(MissingExtraError):  # timm needs torchvision
        names += [*optional("timm", "bench").list_models(), *_torchvision_names()]
    return [name for name in names if fnmatchcase(name, pattern)]


def _build(name: str, num_classes: int | None, pretrained: bool) -> tuple[nn.Module, Normalise]:
    """Return the network without normalisation, and its default normalisation."""
    record, imported = OWN.get(name), ":" in name or name in entry_points(_GROUP)
    if pretrained and (record or imported):
        origin = (record and record.checkpoints) or "your own training: no weights are published"
        raise SettingError(f"pretrained=True: {name} is never downloaded; pass weights=<file> (from {origin}).")
    if record:
        return record.build(num_classes or record.classes), record.normalise
    if is_pretrained_folder(name):
        return build_pretrained(Path(name), num_classes)
    sizes = {} if num_classes is None else {"num_classes": num_classes}
    if imported:
        return _build_imported(name, sizes), "none"
    if name.startswith(_TORCHVISION):
        return _build_torchvision(name, sizes, pretrained), "imagenet"
    timm = optional("timm", "bench")
    if not timm.is_model(name):
        raise _unknown(name)
    network: Any = timm.create_model(name, pretrained=pretrained, **sizes)
    return network, (network.pretrained_cfg["mean"], network.pretrained_cfg["std"])


def _build_imported(name: str, sizes: dict[str, int]) -> nn.Module:
    """Call the function that a path or an entry point names; it gets `num_classes` if that is known."""
    build = import_object(name) if ":" in name else entry_points(_GROUP)[name].load()
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


def _torchvision_names() -> list[str]:
    models = optional("torchvision.models", "bench")
    return [_TORCHVISION + name for name in models.list_models(module=models)]


def _unknown(name: str) -> SettingError:
    near = did_you_mean(name, available(), otherwise=f"Built in: {', '.join(OWN)}.")
    return SettingError(f"network {name!r} is unknown. {near} dpl.backbones.available() lists all.")
