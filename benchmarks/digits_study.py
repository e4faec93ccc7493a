"""The default and its rivals on UCI digits, with networks trained on MNIST: BatchNorm, GroupNorm and a small ViT.

python benchmarks/digits_study.py --store RUNS
python benchmarks/default_study.py collect --data DATA --weights W --store RUNS

Resumable: one line of RUNS/digits.jsonl for each row, stream and seed. The network of `dpl demo` meets three orders of
the digits; the others are trained here, from three seeds, and each meets an order of its own. `default` is what
`dpl.adapt(network)` runs: `dpl_soft` under the guard.
"""

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import dpl
from dpl.core.errors import DplError
from dpl.demo.digits import TRAINED_ON, DigitNetwork, load_source_network, mnist, uci_digits
from dpl.runs.online import evaluate

SEEDS, EPOCHS, PASSES = (0, 1, 2), 10, 10
FIXED = {"method": "dpl_soft", "loss": "none"}
ROWS: dict[str, dict[str, Any]] = {
    "source": {}, "norm": {}, "tent": {}, "t3a": {}, "shot_im": {"lr": 1e-4}, "pl": {"lr": 1e-4}, "dpl": {"lr": 1e-4},
    "eata": {}, "roid": {}, "rotta": {}, "dpl_soft": {}, "default": {"method": None}, "without training": FIXED,
    "matched SHOT-IM": FIXED | {"loss": "information"}, "matched TENT": FIXED | {"loss": "entropy"},
}  # fmt: skip
STREAMS = {"mixed": 32, "class-ordered (8)": 8, "class-ordered (32)": 32, "class-ordered (200)": 200, "ten passes": 32}


@cache
def source_digits() -> tuple[Tensor, Tensor]:
    """Return the MNIST digits that networks are trained on."""
    images, labels = mnist()
    return images[:TRAINED_ON], labels[:TRAINED_ON]


@cache
def target_digits() -> tuple[Tensor, Tensor]:
    """Return the UCI digits."""
    return uci_digits()


class InColour(nn.Module):
    """A network for images of three channels, given grey ones."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C]."""
        logits: Tensor = self.network(images.expand(-1, 3, -1, -1))
        return logits


class SmallViT(nn.Module):
    """Two transformer blocks over a class token and 4 x 4 patches of 8 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_prefix_tokens = 1  # timm's word for tokens that are no patches
        self.patch_embed = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C]."""
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)  # [B, 16, width]
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


class Block(nn.Module):
    """Attention with four heads, then a hidden layer, each added to its normalised input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens of the next block."""
        split = self.mix["qkv"](self.norm1(tokens)).unflatten(-1, (3, 4, -1))  # [B, T, 3, heads, width / heads]
        mixed = scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        tokens = tokens + self.mix["proj"](mixed)
        result: Tensor = tokens + self.mlp(self.norm2(tokens))
        return result


def with_group_norm() -> nn.Module:
    """Return the network of the demo with GroupNorm in place of BatchNorm."""
    network = DigitNetwork()
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            network.set_submodule(name, nn.GroupNorm(4, module.num_features))
    return network


UNTRAINED: dict[str, Callable[[], nn.Module]] = {
    "digits GroupNorm": with_group_norm,
    "digits ViT": lambda: InColour(SmallViT(64)),
}


def train_source_network(seed: int, epochs: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Train a source network on MNIST with small random affine changes; the same seed gives the same network."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make()
    images, labels = source_digits()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    steps = epochs * math.ceil(len(labels) / 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(64):  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(network(_affine(images[rows], generator)), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return network.eval()


def _affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate by up to 10 degrees, scale by up to 15 % and shift by up to 10 %, each image by its own draw."""
    angle, scale, right, down = torch.empty(4, len(images)).uniform_(-1, 1, generator=generator)
    angle, scale = angle * math.radians(10), 1 + 0.15 * scale
    cos, sin = angle.cos() / scale, angle.sin() / scale
    theta = torch.stack([torch.stack([cos, -sin, 0.2 * right], 1), torch.stack([sin, cos, 0.2 * down], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def network_of(section: str, seed: int, store: Path) -> nn.Module:
    """Return a source network: that of the demo, or one trained on MNIST from this seed and kept."""
    if section == "digits":
        return load_source_network()[0]
    path = store / f"{section} {seed}.safetensors"
    if not path.exists():
        save_model(train_source_network(seed, EPOCHS, UNTRAINED[section]), str(path))
    network = UNTRAINED[section]()
    load_model(network, path)
    return network.eval()


def passes(stream: str, seed: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the batches of each pass over the digits."""
    images, labels = target_digits()
    for number in range(PASSES if stream == "ten passes" else 1):
        generator = torch.Generator().manual_seed(seed + 1000 * number)
        order = torch.randperm(len(labels), generator=generator)
        if stream.startswith("class-ordered"):
            place = torch.randperm(10, generator=generator)
            order = order[place[labels[order]].argsort(stable=True)]
        yield [(images[rows], labels[rows]) for rows in order.split(STREAMS[stream])]


def play(section: str, stream: str, label: str, seed: int, store: Path) -> list[dict[str, Any]]:
    """Return a line for the stream, and for several passes also one for the last."""
    settings = {"method": label} | ROWS[label]
    source = list(zip(*(part.split(200) for part in source_digits()), strict=True)) if label == "eata" else None
    torch.manual_seed(seed)
    model = dpl.adapt(network_of(section, seed, store), settings.pop("method"), source=source, **settings)
    found = [evaluate(model, batches) for batches in passes(stream, seed)]
    line = {"section": section, "label": label, "seed": seed}
    whole = line | {
        "column": stream, "n": sum(len(r.labels) for r in found), "updates": sum(r.updates for r in found),
        "accuracy": sum(r.accuracy for r in found) / len(found), "batches": sum(r.batches for r in found),
    }  # fmt: skip
    last = {"column": "tenth pass", "n": len(found[-1].labels), "updates": found[-1].updates,
            "accuracy": found[-1].accuracy, "batches": found[-1].batches}  # fmt: skip
    return [whole, line | last] if len(found) > 1 else [whole]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the digits part of the study of the default.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--sections", nargs="*", default=["digits", *UNTRAINED])
    parser.add_argument("--streams", nargs="*", default=list(STREAMS))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    args.store.mkdir(parents=True, exist_ok=True)
    log = args.store / "digits.jsonl"
    done = [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []
    keys = {(line["section"], line["column"], line["label"], line["seed"]) for line in done}
    for run in product(args.sections, args.streams, ROWS, SEEDS):
        if run in keys:
            continue
        try:
            lines = play(*run, args.store)
        except DplError as error:  # a row that this network cannot have
            print(run, error, flush=True)
            continue
        with log.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        print(run, round(lines[0]["accuracy"], 1), flush=True)


if __name__ == "__main__":
    main()
