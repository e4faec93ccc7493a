"""Compare methods on your own folder of images.

Runs in under a minute on a CPU, without a download: `python examples/compare_methods.py`. The cells (`# %%`) open as a
notebook in editors that know the format, and in Jupyter with jupytext. Needs `pip install '.[demo,bench]'`.
"""

# %% [markdown]
# ## A folder
#
# One sub-folder for each class, such as `photos/cat/*.jpg`. This example writes UCI digits as PNG files.

# %%
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

import dpl
from dpl.data import ImageSet, batches, open_folder, unchanged
from dpl.demo.digits import load_source_network, uci_digits
from dpl.runs.online import OnlineResult, evaluate

COUNT = 256


def write_folder(folder: Path) -> None:
    """Write digits as folder/<class>/<number>.png."""
    images, labels = uci_digits()
    for number, (image, label) in enumerate(zip(images[:COUNT], labels[:COUNT], strict=True)):
        place = folder / str(int(label))
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image[0] * 255).byte().numpy()).save(place / f"{number:04}.png")


temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name) / "digits"
write_folder(folder)
photos = open_folder(folder)
print(f"{len(photos)} images of {len(photos.classes)} classes: {', '.join(photos.classes)}")

# %% [markdown]
# ## A model
#
# Use your own. Images from files are RGB in [0, 1], so a network for grey images needs one more line.


# %%
class Grey(nn.Module):
    """The digit network for RGB images."""

    def __init__(self) -> None:
        super().__init__()
        self.body, _ = load_source_network()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, 10]."""
        logits: Tensor = self.body(images.mean(dim=1, keepdim=True))
        return logits


network = Grey().eval()

# %% [markdown]
# ## The methods
#
# All methods start from the same source model and see the same images in the same order. Two rules make the
# comparison fair. PL and DPL have equal settings. The BatchNorm statistics are named, because they often matter more
# than the method. Report every setting you tried: the best of many on the test images is an oracle, not a result.

# %%
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "source": ("source", {}),
    "norm": ("norm", {}),
    "tent": ("tent", {}),
    "pl": ("pl", {"lr": 1e-4}),
    "dpl": ("dpl", {"lr": 1e-4}),
    "dpl, batch statistics": ("dpl", {"lr": 1e-3, "norm": "batch", "scope": "affine"}),
    "t3a": ("t3a", {}),
}


def stream(images: ImageSet, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the folder as batches in a random order."""
    order = np.random.default_rng(seed).permutation(len(images))
    return [(batch.images, batch.labels) for batch in batches(images, order, unchanged(), 32, workers=2)]


def run(method: str, settings: dict[str, Any]) -> OnlineResult:
    """Return the predictions of a method over the whole stream."""
    return evaluate(dpl.adapt(network, method, **settings), stream(photos, seed=0))


results = {name: run(*candidate) for name, candidate in CANDIDATES.items()}

# %% [markdown]
# ## The table
#
# `accuracy` counts predictions made before the model adapts to a batch. `last 64` is the accuracy at the end, and
# `classes` the number of classes predicted there. A method that collapses keeps one or two. `ms` is per image.

# %%
print(f"\n{'method':24}{'accuracy %':>12}{'last 64 %':>12}{'classes':>9}{'ms':>7}")
for name, result in results.items():
    left = len(set(result.predictions[-64:]))
    milliseconds = 1000 * result.seconds / len(result.labels)
    print(f"{name:24}{result.accuracy:12.1f}{result.tail(64):12.1f}{left:9}{milliseconds:7.1f}")

# %% [markdown]
# ## Without labels
#
# A flat folder has no labels, so the accuracy is unknown. You can still see the confidence of a method, whether it
# predicts all classes, and how often it disagrees with the source model.

# %%
source = np.array(results["source"].predictions)
print(f"\n{'method':24}{'confidence':>12}{'classes':>9}{'differs from source %':>24}")
for name, result in results.items():
    differs = 100 * float((source != np.array(result.predictions)).mean())
    sure = float(np.mean(result.confidences))
    print(f"{name:24}{sure:12.2f}{len(set(result.predictions[-64:])):9}{differs:24.1f}")

temporary.cleanup()

# %% [markdown]
# For one method, the command line does the same: `dpl adapt --method dpl --model ... --images photos`. For protocols,
# seeds, several domains and a search of settings on source data, write an experiment file: docs/bench.md.
