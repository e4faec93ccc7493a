"""The streams on which the automatic choice is designed, and those on which it is only tested at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpl.backbones import create
from dpl.data import batches, open_folder, square
from dpl.data.corruptions import corrupt
from dpl.demo.digits import load_source_network, mnist, uci_digits

# PACS, CIFAR and ImageNet images; source models by target domain as `dpl train` leaves them; ImageNet weights.
DATA = Path(os.environ.get("DPL_DATA", "data"))
PACS_WEIGHTS = Path(os.environ.get("DPL_PACS_WEIGHTS", "weights/pacs"))
IMAGENET_WEIGHTS = Path(os.environ.get("DPL_IMAGENET_WEIGHTS", "weights"))


@dataclass(frozen=True)
class Stream:
    """One stream: a network, its images in their order, and the size of a batch."""

    name: str
    held_out: bool
    build: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    batch: int
    order: str = "shuffled"  # or "sorted" by class, or "runs" of one class of about two batches
    most: int = 12  # batches of a shuffled stream

    def open(self) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        """Return the source network and the batches (images, labels)."""
        network, images, labels = self.build()
        rows = arranged(labels, self.order, self.batch)
        network, images = (
            network.to(memory_format=torch.channels_last),
            images.contiguous(memory_format=torch.channels_last),
        )
        parts = rows.split(self.batch)[: self.most if self.order == "shuffled" else None]
        return network, [(images[part], labels[part]) for part in parts]


def arranged(labels: Tensor, order: str, batch: int) -> Tensor:
    """Return the rows in the order of the stream."""
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    if order == "shuffled":
        return rows
    rows = rows[labels[rows].argsort(stable=True)]
    if order == "sorted":
        return rows
    runs = list(rows.split(2 * batch))
    return torch.cat([runs[i] for i in np.random.default_rng(1).permutation(len(runs))])


def cifar(kind: int, corruption: str | None, severity: int = 0, count: int = 1000) -> Any:
    """Return the builder of a CIFAR-10 (ResNet-20) or CIFAR-100 (ResNet-32) stream, clean or corrupted."""

    def build() -> tuple[nn.Module, Tensor, Tensor]:
        pixels, labels = _cifar_arrays(kind)
        chosen = np.random.default_rng(kind).permutation(len(labels))[:count]
        images = pixels[chosen]
        if corruption is not None:
            images = corrupt(images, corruption, severity)
        return cifar_network(kind), _floats(images), torch.from_numpy(labels[chosen]).long()

    return build


def cifar_network(kind: int) -> nn.Module:
    """Return the CIFAR source network."""
    name = {10: "cifar_resnet20", 100: "cifar100_resnet32"}[kind]
    return create(name, weights=DATA / "weights" / f"{name if kind == 100 else 'cifar10_resnet20'}.safetensors")


@cache
def _cifar_arrays(kind: int) -> tuple[Any, Any]:
    with np.load(DATA / f"cifar{kind}_test.npz", allow_pickle=False) as file:
        return file["images"], file["labels"]


def pacs(target: str, count: int = 480, model: str | None = None) -> Any:
    """Return the builder of a PACS stream; `model` is the target for which the source model was trained."""

    def build() -> tuple[nn.Module, Tensor, Tensor]:
        weights = PACS_WEIGHTS / (model or target) / "best.safetensors"
        network = create("tf_efficientnet_lite0", num_classes=7, weights=weights)
        return network, *_folder(DATA / "PACS" / target, count, 96)

    return build


def imagenet(network: str, corruption: str | None, severity: int = 3, count: int = 320, size: int = 128) -> Any:
    """Return the builder of a stream of ImageNet validation images."""

    def build() -> tuple[nn.Module, Tensor, Tensor]:
        file = {"torchvision/mobilenet_v2": "mobilenet_v2", "tf_efficientnet_lite0": "efficientnet_lite0"}[network]
        model = create(network, weights=IMAGENET_WEIGHTS / f"{file}.safetensors")
        images, labels = _folder(DATA / "imagenet_val", count, size)
        if corruption is not None:
            pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
            images = _floats(corrupt(pixels, corruption, severity, constants="imagenet"))
        return model, images, labels

    return build


def digits(target: str, count: int = 960) -> Any:
    """Return the builder of a stream of UCI digits, or of MNIST digits that the network was not trained on."""

    def build() -> tuple[nn.Module, Tensor, Tensor]:
        network, _ = load_source_network()
        images, labels = uci_digits() if target == "uci" else tuple(part[4500:] for part in mnist())
        return network, images[:count], labels[:count]

    return build


def _folder(root: Path, count: int, size: int) -> tuple[Tensor, Tensor]:
    images = open_folder(root)
    rows = np.random.default_rng(0).permutation(len(images))[:count]
    parts = list(batches(images, rows, square(size), 64))
    return torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts])


def _floats(pixels: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 1))).float() / 255


_MOBILE, _LITE = "torchvision/mobilenet_v2", "tf_efficientnet_lite0"
STREAMS = [
    # looked at while the scores were designed
    Stream("c10 gaussian_noise 5", False, cifar(10, "gaussian_noise", 5), 50),
    Stream("c10 gaussian_noise 2", False, cifar(10, "gaussian_noise", 2), 50),
    Stream("c10 defocus_blur 5", False, cifar(10, "defocus_blur", 5), 50),
    Stream("c10 contrast 5", False, cifar(10, "contrast", 5), 50),
    Stream("c10 clean", False, cifar(10, None), 50),
    Stream("c10 gaussian_noise 5, batch 8", False, cifar(10, "gaussian_noise", 5, 640), 8, most=48),
    Stream("c10 clean, sorted", False, cifar(10, None), 50, "sorted"),
    Stream("c10 defocus_blur 5, sorted", False, cifar(10, "defocus_blur", 5), 50, "sorted"),
    Stream("c100 gaussian_noise 3", False, cifar(100, "gaussian_noise", 3, 400), 40, most=8),
    Stream("pacs sketch", False, pacs("sketch"), 32),
    Stream("pacs cartoon", False, pacs("cartoon"), 32),
    Stream("pacs cartoon, a source domain", False, pacs("cartoon", model="sketch"), 32),
    Stream("pacs sketch, sorted", False, pacs("sketch"), 32, "sorted"),
    Stream("imagenet contrast 3, MobileNetV2", False, imagenet(_MOBILE, "contrast"), 32, most=8),
    Stream("imagenet clean, MobileNetV2", False, imagenet(_MOBILE, None), 32, most=8),
    Stream("digits", False, digits("uci"), 32, most=30),
    # not looked at before the end
    Stream("c10 fog 5", True, cifar(10, "fog", 5), 50),
    Stream("c10 jpeg_compression 3", True, cifar(10, "jpeg_compression", 3), 100, most=6),
    Stream("c10 shot_noise 3, batch 8", True, cifar(10, "shot_noise", 3, 640), 8, most=48),
    Stream("c10 contrast 5, runs of a class", True, cifar(10, "contrast", 5, 600), 30, "runs"),
    Stream("c10 impulse_noise 3, sorted", True, cifar(10, "impulse_noise", 3, 600), 30, "sorted"),
    Stream("c100 defocus_blur 5", True, cifar(100, "defocus_blur", 5, 400), 40, most=8),
    Stream("c100 brightness 3", True, cifar(100, "brightness", 3, 400), 40, most=8),
    Stream("pacs art_painting", True, pacs("art_painting"), 32),
    Stream("pacs photo", True, pacs("photo"), 32),
    Stream("imagenet gaussian_noise 3, Lite0", True, imagenet(_LITE, "gaussian_noise"), 32, most=8),
    Stream("imagenet fog 3, Lite0", True, imagenet(_LITE, "fog"), 32, most=8),
    Stream("digits, runs of a class", True, digits("uci"), 32, "runs"),
    Stream("mnist, the source's own", True, digits("mnist"), 32, most=30),
]
DESIGN = [stream for stream in STREAMS if not stream.held_out]
HELD_OUT = [stream for stream in STREAMS if stream.held_out]
