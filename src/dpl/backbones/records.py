"""Records of the built-in networks: size, features, normalisation, and the origin of their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from dpl.backbones.cifar import CifarResNet, ResNeXt29, WideResNet, WideStemResNet
from dpl.backbones.debug import DebugCNN, DebugMixer, DebugViT, group_norm
from dpl.backbones.domainnet import BottleneckResNet50
from dpl.backbones.normalise import Normalise

__all__ = ["OWN", "NetworkRecord"]

# Closer to the deviation within an image than over all pixels, but many CIFAR-10 networks were trained with it.
_CIFAR_SMALL_STD = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CIFAR100 = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


@dataclass(frozen=True)
class NetworkRecord:
    """A built-in network; the counts are for its default number of classes."""

    name: str
    build: Callable[[int], nn.Module]
    """Builds the network, without normalisation, for a number of classes."""
    classes: int
    parameters: int
    features: int
    """Length of the input vector of the linear classifier."""
    input_size: int
    """Side of the images, in pixels, that its checkpoints were trained with."""
    normalise: Normalise
    checkpoints: str = ""
    """Source of weight files with these parameter names; empty if there are none."""
    accuracy: float | None = None
    """Clean test accuracy of such a file in percent, if known."""


_CIFAR_RESNETS = {20: (269_722, 91.73), 32: (464_154, 92.63), 44: (658_586, 93.10), 56: (853_018, 93.39),
                  110: (1_727_962, 93.68)}  # fmt: skip  # depth: parameters, accuracy

_NETWORKS = (
    NetworkRecord("wrn28_10", partial(WideResNet, 28, 10), 10, 36_479_194, 640, 32, "none",
                  "RobustBench, CIFAR-10 corruptions, Standard.pt", 94.78),
    NetworkRecord("wrn28_1", partial(WideResNet, 28, 1, stage="layer", head="linear"), 10, 369_498, 64, 32,
            _CIFAR_SMALL_STD, "files with the names layer1..3.layer.N and linear", 92.9),
    NetworkRecord("resnext29", ResNeXt29, 100, 6_900_132, 1024, 32, _HALF,
                  "RobustBench, CIFAR-100 corruptions, Hendrycks2020AugMix_ResNeXt.pt", 78.90),
    *(NetworkRecord(f"cifar_resnet{depth}", partial(CifarResNet, depth), 10, parameters, 64, 32, "imagenet",
                    f"akamaster/pytorch_resnet_cifar10, resnet{depth}.th", accuracy)
      for depth, (parameters, accuracy) in _CIFAR_RESNETS.items()),
    NetworkRecord("cifar100_resnet32", WideStemResNet, 100, 501_316, 256, 32, _CIFAR100,
            "files with a stem of 64 channels and 256 features", 71.9),
    NetworkRecord("domainnet126_resnet50", BottleneckResNet50, 126, 24_065_596, 256, 224, "imagenet",
            "AdaContrast (Chen et al., 2022), best_<domain>_<seed>.pth.tar"),
    NetworkRecord("debug_cnn", DebugCNN, 10, 6_418, 32, 32, "none"),
    NetworkRecord("debug_gn", partial(DebugCNN, norm=group_norm), 10, 6_418, 32, 32, "none"),
    NetworkRecord("debug_vit", DebugViT, 10, 24_234, 32, 32, "none"),
    NetworkRecord("debug_mixer", DebugMixer, 10, 17_354, 32, 32, "none"),
)  # fmt: skip

OWN: dict[str, NetworkRecord] = {network.name: network for network in _NETWORKS}
"""The built-in networks by name."""
