"""The tiny network and stream on which the authors' own code was traced, and the comparison with a trace.

The traces in tests/parity/data were packed from full ones by pack.py: logits as they are, states reduced to two random
projections for each tensor (a difference of 1e-7 in any element shows in them).
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import dpl

DATA = Path(__file__).parent / "data"
MEASURED: dict[str, dict[str, float]] = {}  # trace -> largest differences seen in this session


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class TinyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        widths, strides = [8, 8, 16, 24, 32], [1, 2, 2, 2]
        for k in range(4):
            setattr(self, f"layer{k + 1}", nn.Sequential(Block(widths[k], widths[k + 1], strides[k])))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1((x - 0.5) / 0.25)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def tiny_network(dtype: torch.dtype = torch.float64) -> TinyResNet:
    network = TinyResNet()
    network.load_state_dict(load_file(DATA / "model.safetensors"))
    return network.eval().to(dtype)


@cache
def _arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def stream(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The 12 batches of 32 images."""
    return list(torch.from_numpy(_arrays("stream")["images"]).to(dtype))


def source_images(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The 1,437 labelled source images in the traced order."""
    grey = torch.from_numpy(_arrays("source")["images"]).to(dtype)
    return grey[:, None].expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(_arrays("source")["labels"]).long()


def source_batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """The source images and labels in batches of 32."""
    images, labels = source_images(dtype)
    return list(zip(images.split(32), labels.split(32), strict=True))


def clean_test_images(dtype: torch.dtype = torch.float64) -> Tensor:
    """The first 96 clean test images (for the mixed streams)."""
    grey = torch.from_numpy(_arrays("source")["clean_test_images"]).to(dtype)
    return grey[:, None].expand(-1, 3, -1, -1).contiguous()


def trace(name: str) -> dict[str, np.ndarray]:
    """One packed trace."""
    return _arrays(name)


def meta(name: str) -> dict[str, Any]:
    return json.loads(str(trace(name)["meta"]))


class Roll:
    """The fixed stand-in for random augmentation: the k-th call rolls the batch by the k-th of four offsets."""

    offsets = ((0, 1), (1, 0), (0, -1), (-1, 0))

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        offset = self.offsets[self.calls % 4]
        self.calls += 1
        return torch.roll(images, offset, dims=(2, 3))


def project(name: str, values: np.ndarray) -> np.ndarray:
    """Two fixed random projections of an array, scaled so that they move as its elements do."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    rng = np.random.default_rng(abs(hash_name(name)))
    return np.array([rng.standard_normal(flat.size) @ flat, rng.standard_normal(flat.size) @ flat])


def hash_name(name: str) -> int:
    return int.from_bytes(name.encode()[-8:], "little")


def largest_state_difference(
    name: str, ours: dict[str, Tensor], prefix: str = "state1/", rename: Callable[[str], str] = str
) -> float:
    """The largest difference between projections of the traced state and of ours, over all traced tensors.

    `rename` gives our name for a traced one.
    """
    worst = 0.0
    for key, expected in trace(name).items():
        if key.startswith(prefix):
            own = ours[rename(key[len(prefix) :])].detach().cpu().numpy()
            if expected.dtype.kind == "f":  # integers were packed as they are
                own = project(key[len(prefix) :], own)
            worst = max(worst, float(np.abs(own - expected).max()))
    MEASURED.setdefault(name, {})["state"] = worst
    return worst


def teacher_and_model(traced: str) -> str:
    """Our name for a traced entry of the teacher's or the model's state."""
    _, slash, key = traced.partition("/")
    return f"method.teacher.weights.{key}" if slash else f"model.{traced}"


def logits_difference(name: str, logits: np.ndarray, expected: np.ndarray | None = None) -> float:
    """The largest difference between our outputs over the whole stream and the traced ones."""
    worst = float(np.abs(logits - (trace(name)["logits"] if expected is None else expected)).max())
    MEASURED.setdefault(name, {})["logits"] = worst
    return worst


def run(adaptive: dpl.AdaptiveModel, batches: list[Tensor]) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Feed the stream; return all logits and the plain network's state after the first batch."""
    outputs, first = [], {}
    for i, images in enumerate(batches):
        outputs.append(adaptive(images).numpy())
        if i == 0:
            first = {key: value.clone() for key, value in adaptive.model.state_dict().items()}
    return np.stack(outputs), first


def compare(
    name: str,
    adaptive: dpl.AdaptiveModel,
    batches: list[Tensor] | None = None,
    rename: Callable[[str], str] = str,
) -> dict[str, float]:
    """Run ours over the traced stream; return the largest differences in logits and in the first state."""
    logits, first = run(adaptive, batches or stream())
    return {
        "logits": logits_difference(name, logits),
        "state": largest_state_difference(name, first, rename=rename),
    }


def require_the_trace(
    name: str,
    adaptive: dpl.AdaptiveModel,
    tolerance: float,
    rename: Callable[[str], str] = teacher_and_model,
    complete: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> list[dict[str, Any]]:
    """Run ours over the traced stream; require equal logits and an equal first state. Return what each step said.

    `complete` adds to our state what the traced one holds without use.
    """
    outputs, said = [], []
    for images in stream():
        outputs.append(adaptive(images).numpy())
        said.append(dict(adaptive.last))
        if len(outputs) == 1:
            after_first = complete(adaptive.state_dict())
    assert logits_difference(name, np.stack(outputs)) < tolerance
    assert largest_state_difference(name, after_first, rename=rename) < tolerance
    return said


def with_drawn_projector(name: str, adaptive: dpl.AdaptiveModel) -> dpl.AdaptiveModel:
    """Give a method the projector that the traced run drew."""
    drawn = {
        f"method.projector.{key.rpartition('/')[2]}": torch.from_numpy(value).to(adaptive.network.dtype)
        for key, value in trace(name).items()
        if key.startswith("init/projector/")
    }
    assert len(drawn) == 4
    adaptive.load_state_dict(adaptive.state_dict() | drawn)
    return adaptive


def projector_and_model(traced: str) -> str:
    """Our name for a traced entry of the projector's, the teacher's or the model's state."""
    return f"method.{traced.replace('/', '.')}" if traced.startswith("projector/") else teacher_and_model(traced)


def with_unused_buffers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the buffers target_mean (zeros) and target_var (ones) that RoTTA's traced layers have and nothing uses."""
    means = {key.replace("running", "target"): torch.zeros_like(state[key]) for key in state if "running_mean" in key}
    variances = {key.replace("running", "target"): torch.ones_like(state[key]) for key in state if "running_var" in key}
    return state | means | variances


def require_same_classes(name: str, adaptive: dpl.AdaptiveModel, margin: float, least: float) -> None:
    """Run a network in single precision over the stream; require the traced classes wherever they are clear."""
    logits, _ = run(adaptive, stream(torch.float32))
    clear, equal = same_classes(logits, trace(name)["logits"], margin)
    assert clear > least
    assert equal == 1


def same_classes(outputs: np.ndarray, expected: np.ndarray, margin: float) -> tuple[float, float]:
    """Compare classes where the two largest traced outputs differ by more than `margin`.

    Returns the fraction of such images, and the fraction of them that get the traced class.
    """
    largest = np.sort(expected, axis=2)
    clear = largest[..., -1] - largest[..., -2] > margin
    equal = outputs.argmax(axis=2) == expected.argmax(axis=2)
    return float(clear.mean()), float(equal[clear].mean())
