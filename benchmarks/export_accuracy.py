"""What an export costs: accuracy of adapted models and of their exported files, on images met after the export.

    python benchmarks/export_accuracy.py --out docs/results/export.md

DPL_DATA names the folder with `cifar10_test.npz` and `weights/cifar10_resnet20.safetensors`.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpl
from dpl.backbones import create
from dpl.data.corruptions import corrupt

DATA = Path(os.environ.get("DPL_DATA", "data"))
STREAMS = (("contrast", 4), ("gaussian_noise", 3), ("fog", 5))
METHODS = ("tent", "dpl", "t3a", "dpl_soft")
ADAPTED, TESTED = 2000, 2000  # images

PAGE = """# Accuracy of exported models

`model.export` writes a plain network with fixed statistics. This page compares it with the adaptive
model on images that come after the export.
*Measured 2026-11-18 by `python benchmarks/export_accuracy.py`.*

CIFAR-10, ResNet-20, {adapted:,} images to adapt to, {tested:,} other images of the same stream to
test on, batches of {batch}, seed 0. Corruptions are regenerated. All figures are accuracy in %;
"adapted" predicts the test images without further adaptation, "weights alone" is
`model.model.state_dict()` in a plain network.

| stream | method | source | adapted | weights alone | exported, `state_dict` | exported, ONNX | agreement |
|---|---|---|---|---|---|---|---|
{rows}

`dpl` and `t3a` use running statistics and are exported exactly. The others normalise by each batch;
their export has fixed statistics. `tent` then gains 0.6 to 2.8 points, `dpl_soft` 0.1 to 1.6.
"Agreement" is on the last batch.
"""


def images_of(corruption: str, severity: int) -> tuple[Tensor, Tensor]:
    """Return shuffled, corrupted images in [0, 1] and their labels."""
    file = np.load(DATA / "cifar10_test.npz")
    rows = np.random.default_rng(0).permutation(len(file["labels"]))[: ADAPTED + TESTED]
    noisy = corrupt(file["images"][rows], corruption, severity, seed=0)
    images = torch.from_numpy(noisy).permute(0, 3, 1, 2).float() / 255
    return images, torch.from_numpy(file["labels"][rows].astype(np.int64))


def network() -> nn.Module:
    return create("cifar_resnet20", weights=DATA / "weights/cifar10_resnet20.safetensors")


def accuracy(predict: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, batch: int) -> float:
    parts = zip(images.split(batch), labels.split(batch), strict=True)
    with torch.no_grad():
        right = sum(int((predict(x).argmax(1) == y).sum()) for x, y in parts)
    return 100 * right / len(labels)


def plain(state: dict[str, Tensor]) -> nn.Module:
    model = network()
    model.load_state_dict(state)
    return model.eval()


def measure(method: str, images: Tensor, labels: Tensor, batch: int) -> list[str]:
    """Adapt to the first images, export, and test everything on the others."""
    model = dpl.adapt(network(), method)
    for part in images[:ADAPTED].split(batch):
        model(part)
    with tempfile.TemporaryDirectory() as folder:
        exported = model.export(Path(folder) / "a.safetensors")
        onnx = onnxruntime.InferenceSession(str(model.export(Path(folder) / "a.onnx", "onnx").path))
        state = load_file(exported.path)
    rest, answers = images[ADAPTED:], labels[ADAPTED:]
    forms: list[Callable[[Tensor], Tensor]] = [
        network(),
        model.predict,
        plain(model.model.state_dict()),
        plain(state),
        lambda x: torch.from_numpy(onnx.run(None, {"images": x.numpy()})[0]),
    ]
    figures = [f"{accuracy(form, rest, answers, batch):.1f}" for form in forms]
    return [f"`{method}`", *figures, f"{100 * (exported.agreement or 0):.0f} %"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=100)
    args = parser.parse_args()
    rows = []
    for corruption, severity in STREAMS:
        images, labels = images_of(corruption, severity)
        for method in METHODS:
            if method in dpl.list_methods():
                row = [f"{corruption} {severity}", *measure(method, images, labels, args.batch)]
                print(*row, sep="\t", flush=True)
                rows.append(f"| {' | '.join(row)} |")
    if args.out is not None:
        args.out.write_text(PAGE.format(rows="\n".join(rows), batch=args.batch, adapted=ADAPTED, tested=TESTED))


if __name__ == "__main__":
    main()
