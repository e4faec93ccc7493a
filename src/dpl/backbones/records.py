"""What is known about each network of our own: size, features, normalisation, and where its weights come from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from dpl.backbones.cifar_resnet import CifarResNet, WideStemResNet
from dpl.backbones.debug import DebugCNN, DebugMixer, DebugViT, group_norm
from dpl.backbones.domainnet import BottleneckResNet50
from dpl.backbones.normalise import Normalise
from dpl.backbones.resnext import ResNeXt29
from dpl.backbones.wide_resnet import WideResNet

__all__ = ["OWN", "Network"]

# Nearer to the spread inside an image than to that of all pixels, yet what many CIFAR-10 networks were trained with.
_CIFAR_SMALL_STD = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CIFAR100 = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
_HE = "akamaster/pytorch_resnet_cifar10, resnet{}.th"


@dataclass(frozen=True)
class Network:
    """One network of our own; the counts hold for its default number of classes."""

    name: str
    build: Callable[[int], nn.Module]
    """Makes the bare network for a number of classes."""
    classes: int
    parameters: int
    features: int
    """Length of the vector that enters the linear classifier."""
    input_size: int
    """Side of the images, in pixels, that its checkpoints were trained with."""
    normalise: Normalise
    checkpoints: str = ""
    """Where weight files with these parameter names are found; empty if there are none."""
    accuracy: float | None = None
    """Clean test accuracy in percent that such a file reaches, where known."""


def _cifar_resnet(depth: int, parameters: int, accuracy: float) -> Network:
    return Network(
        f"cifar_resnet{depth}", partial(CifarResNet, depth), 10, parameters, 64, 32,
        "imagenet", _HE.format(depth), accuracy,
    )  # fmt: skip


_NETWORKS = (
    Network("wrn28_10", partial(WideResNet, 28, 10), 10, 36_479_194, 640, 32, "none",
            "RobustBench, CIFAR-10 corruptions, Standard.pt", 94.78),
    Network("wrn28_1", partial(WideResNet, 28, 1, stage="layer", head="linear"), 10, 369_498, 64, 32,
            _CIFAR_SMALL_STD, "files with the names layer1..3.layer.N and linear", 92.9),
    Network("resnext29", ResNeXt29, 100, 6_900_132, 1024, 32, _HALF,
            "RobustBench, CIFAR-100 corruptions, Hendrycks2020AugMix_ResNeXt.pt", 78.90),
    _cifar_resnet(20, 269_722, 91.73),
    _cifar_resnet(32, 464_154, 92.63),
    _cifar_resnet(44, 658_586, 93.10),
    _cifar_resnet(56, 853_018, 93.39),
    _cifar_resnet(110, 1_727_962, 93.68),
    Network("cifar100_resnet32", WideStemResNet, 100, 501_316, 256, 32, _CIFAR100,
            "files with a stem of 64 channels and 256 features", 71.9),
    Network("domainnet126_resnet50", BottleneckResNet50, 126, 24_065_596, 256, 224, "imagenet",
            "AdaContrast (Chen et al., 2022), best_<domain>_<seed>.pth.tar"),
    Network("debug_cnn", DebugCNN, 10, 6_418, 32, 32, "none"),
    Network("debug_gn", partial(DebugCNN, norm=group_norm), 10, 6_418, 32, 32, "none"),
    Network("debug_vit", DebugViT, 10, 24_234, 32, 32, "none"),
    Network("debug_mixer", DebugMixer, 10, 17_354, 32, 32, "none"),
)  # fmt: skip

OWN: dict[str, Network] = {network.name: network for network in _NETWORKS}
"""Our own networks by name."""
