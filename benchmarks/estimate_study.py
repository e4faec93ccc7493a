"""How well accuracy is estimated without labels: ATC, DoC, AETTA, COT and ours, side by side.

    DPL_DATA=/path/to/data python benchmarks/estimate_study.py --out runs/estimate            # record, then score
    DPL_DATA=... python benchmarks/estimate_study.py --out runs/estimate --only resnet20      # a part
    python benchmarks/estimate_study.py --out runs/estimate --score                           # score what is recorded

Recording runs each stream once, unguarded, and keeps the logits of source and adapted model, shrunk ones, and what
AETTA and the anchor need, in OUT/*.npz: a run that was stopped continues. Scoring needs seconds and writes
docs/results/data/estimate.json, from which `docs/generate.py` makes docs/results/estimate.md.

`DPL_DATA` holds cifar10_test.npz, cifar100_test.npz and weights/. The first 1,000 images are labelled source data; the
streams are made of the others. Rules were chosen on DESIGN, and some of them with REPORT in view. FRESH was written
down and run once after all of them were fixed.
"""

import argparse
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from origin import origin
from torch import Tensor, nn

import dpl
from dpl.backbones import create
from dpl.core.numerics import same_class
from dpl.data.corruptions import corrupt
from dpl.estimate import EstimateSettings, Watch
from dpl.estimate.difference import Comparison, compared
from dpl.estimate.signals import Home, Window, accuracies, assigned_probability
from dpl.network.split import logits_of
from dpl.views.shifts import beside_others, shifted_copies, shrunk

DATA = Path(os.environ.get("DPL_DATA", "data"))
COMMAND = "DPL_DATA=DATA python benchmarks/estimate_study.py --out RUNS"
HOME, ANCHORS, BATCH, WINDOW = 1000, 200, 200, 400
COMMON = 0  # the class of streams of one class, and of 80 % of skewed ones
SEVERITY = {"gaussian_noise": 3, "impulse_noise": 3}  # of 5, where 5 leaves nothing to recognise
DROPOUT, PASSES = 0.4, 10  # AETTA's
NETWORKS = {
    "resnet20": ("cifar_resnet20", "cifar10_resnet20", "cifar10_test"),
    "resnet56": ("cifar_resnet56", "cifar10_resnet56", "cifar10_test"),
    "cifar100": ("cifar100_resnet32", "cifar100_resnet32", "cifar100_test"),
    "wrn28": ("wrn28_1", "cifar10_wrn28_1", "cifar10_test"),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "tent": ("tent", {}),
    "dpl": ("dpl", {"norm": "batch", "scope": "affine", "lr": 1e-3}),
    "collapsing": ("tent", {"lr": 0.1}),
    "dpl_soft": ("dpl_soft", {}),
}


class Run(NamedTuple):
    """One network, stream and method."""

    network: str
    corruption: str
    order: str
    method: str
    images: int = 1200
    seed: int = 0

    @property
    def name(self) -> str:
        return "-".join(map(str, self[:4]))


DESIGN = [
    *(Run("resnet20", c, "shuffled", m)
      for c in ("clean", "gaussian_noise", "contrast", "motion_blur") for m in ("tent", "dpl")),
    *(Run("resnet20", c, "sorted", "tent") for c in ("clean", "gaussian_noise")),
    *(Run("resnet20", "gaussian_noise", o, m) for o in ("skewed", "one class") for m in ("tent", "dpl")),
    Run("resnet20", "gaussian_noise", "shuffled", "collapsing"),
]  # fmt: skip
REPORT = [
    *(Run("resnet56", c, "shuffled", "tent", 1000) for c in ("clean", "fog", "pixelate", "jpeg_compression")),
    Run("resnet56", "fog", "shuffled", "dpl", 1000),
    Run("resnet56", "shot_noise", "sorted", "tent", 1000),
    Run("resnet56", "pixelate", "skewed", "tent", 1000),
    Run("resnet56", "shot_noise", "shuffled", "collapsing", 1000),
    *(Run("cifar100", c, "shuffled", "tent", 1000) for c in ("clean", "brightness", "pixelate", "impulse_noise")),
    Run("cifar100", "pixelate", "sorted", "tent", 1000),
    Run("cifar100", "impulse_noise", "shuffled", "collapsing", 1000),
]
FRESH = [
    *(Run("wrn28", c, "shuffled", "tent", 1000)
      for c in ("clean", "snow", "frost", "elastic_transform", "glass_blur", "brightness")),
    Run("wrn28", "defocus_blur", "shuffled", "dpl", 1000),
    *(Run("wrn28", c, "shuffled", "dpl_soft", 1000) for c in ("clean", "zoom_blur", "snow")),
    *(Run("wrn28", c, "sorted", m, 1000) for c, m in (("frost", "tent"), ("zoom_blur", "dpl_soft"))),
    Run("wrn28", "snow", "skewed", "tent", 1000),
    *(Run("wrn28", c, "shuffled", "collapsing", 1000) for c in ("zoom_blur", "glass_blur")),
    *(Run("cifar100", c, "shuffled", "tent", 1000) for c in ("snow", "zoom_blur")),
    Run("cifar100", "fog", "shuffled", "dpl_soft", 1000),
    Run("cifar100", "contrast", "shuffled", "collapsing", 1000),
]  # fmt: skip


def as_tensor(pictures: Any) -> Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div(255).contiguous()


def load(name: str) -> tuple[nn.Module, Any, Tensor]:
    """Return the network and all images and labels of its data set."""
    kind, weights, data = NETWORKS[name]
    with np.load(DATA / f"{data}.npz", allow_pickle=False) as file:
        images, labels = file["images"], torch.from_numpy(file["labels"].astype(np.int64))
    return create(kind, weights=DATA / "weights" / f"{weights}.safetensors").eval(), images, labels


def positions(labels: Tensor, order: str, count: int, seed: int = 0) -> Tensor:
    """Return which images are met, in which order."""
    generator = torch.Generator().manual_seed(zlib.crc32(order.encode()) + seed)
    rows = HOME + torch.randperm(len(labels) - HOME, generator=generator)
    first = rows[labels[rows] == COMMON]
    if order == "one class":
        return first[:count]
    if order == "skewed":  # 80 % of one class
        part = min(len(first), int(0.8 * count))
        rows = torch.cat([first[:part], rows[labels[rows] != COMMON][: part // 4]])
        return rows[torch.randperm(len(rows), generator=generator)]
    rows = rows[:count]
    return rows[labels[rows].argsort(stable=True)] if order == "sorted" else rows


def stream(run: Run, images: Any, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = positions(labels, run.order, run.images, run.seed)
    for part in rows.split(BATCH):
        pictures = images[part.numpy()]
        if run.corruption != "clean":
            pictures = corrupt(pictures, run.corruption, SEVERITY.get(run.corruption, 5), start=int(part[0]))
        yield as_tensor(pictures), labels[part]


@torch.no_grad()
def forward(network: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([logits_of(network(part)) for part in images.split(BATCH)])


def record_home(name: str, out: Path) -> None:
    """Keep the source model's logits for labelled source images, clean and under synthetic shifts."""
    path = out / f"{name}-home.npz"
    if path.exists():
        return
    network, images, labels = load(name)
    copies = list(shifted_copies(as_tensor(images[:HOME]), torch.Generator().manual_seed(0)))
    source = torch.stack([forward(network, copy) for copy in copies])
    again = torch.stack([forward(network, shrunk(copy)) for copy in copies])
    np.savez(path, labels=labels[:HOME], source=source, again=again)


@torch.no_grad()
def dropout_votes(model: dpl.AdaptiveModel, images: Tensor) -> tuple[float, Tensor]:
    """Return AETTA's disagreement under dropout before the classifier, and the mean probabilities [C]."""
    out = model.network(images)
    classifier, generator = model.network.classifier, torch.Generator().manual_seed(0)
    own, differ, mean = out.logits.argmax(dim=1), 0.0, torch.zeros(out.logits.shape[1])
    for _ in range(PASSES):
        kept = torch.rand(out.z.shape, generator=generator) >= DROPOUT
        logits = classifier(out.z * kept / (1 - DROPOUT))
        differ += float((logits.argmax(dim=1) != own).float().mean()) / PASSES
        mean += logits.softmax(dim=1).mean(dim=0) / PASSES
    return differ, mean


def record(run: Run, out: Path) -> None:
    """Run one stream and keep the logits."""
    path = out / f"{run.name}.npz"
    if path.exists():
        return
    network, images, labels = load(run.network)
    method, settings = METHODS[run.method]
    model = dpl.adapt(network, method, layout="as_is", **settings)
    watch, anchors, kept = Watch(EstimateSettings(), network), as_tensor(images[:ANCHORS]), list[dict[str, Tensor]]()
    for batch, known in stream(run, images, labels):
        adapted = model(batch)
        differ, mean = dropout_votes(model, batch)
        guesses = model.predict(anchors).argmax(dim=1)
        kept.append({
            "labels": known, "source": watch.source_and_shift(batch), "shift": watch.shift.expand(len(batch)),
            "source_again": forward(network, shrunk(batch)),
            "adapted": adapted, "beside": model.predict(beside_others(batch))[: len(batch)],
            "adapted_alike": same_class(adapted), "early_alike": same_class(watch.early(batch)),
            "anchor": torch.full((len(batch),), float((guesses == labels[:ANCHORS]).float().mean())),
            "differ": torch.full((len(batch),), differ), "mean": mean.expand(len(batch), -1),
        })  # fmt: skip
    arrays = {key: torch.cat([part[key] for part in kept]).numpy() for key in kept[0]}
    np.savez(path, **{k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in arrays.items()})
    right = [(arrays[k].argmax(1) == arrays["labels"]).mean() for k in ("source", "adapted")]
    print(run.name, f"source {100 * right[0]:.1f}, adapted {100 * right[1]:.1f}", flush=True)


class Source(NamedTuple):
    """What every estimator may use of the labelled source data."""

    home: Home
    threshold: float  # ATC: the share of more confident predictions equals the accuracy
    confidence: float  # DoC

    @classmethod
    def read(cls, path: Path) -> "Source":
        with np.load(path, allow_pickle=False) as file:
            logits = torch.stack([torch.from_numpy(file["source"]), torch.from_numpy(file["again"])], dim=1)
            labels = torch.from_numpy(file["labels"])
        home = Home()
        home.learn(logits, labels)
        sure = (logits[0, 0] / home.temperature).softmax(dim=1).amax(dim=1)
        return cls(home, float(sure.quantile(1 - home.accuracy)), float(sure.mean()))


def rivals(logits: Tensor, source: Source) -> dict[str, float]:
    """Return the estimates that look at one model's logits."""
    p = (logits / source.home.temperature).softmax(dim=1)
    sure, balance = p.amax(dim=1), source.home.balance
    return {
        "confidence": float(sure.mean()),
        "ATC": float((sure > source.threshold).double().mean()),
        "DoC": source.home.accuracy + float(sure.mean()) - source.confidence,
        "COT": float(assigned_probability(p, balance, slack=0.0)),
    }  # fmt: skip


def aetta(part: Mapping[str, Any]) -> float:
    """1 - disagreement under dropout * (entropy of the mean prediction / its maximum)^-3."""
    mean = torch.from_numpy(part["mean"]).double().mean(dim=0)
    entropy = float(-(mean * mean.clamp(min=1e-12).log()).sum() / np.log(len(mean)))
    return max(0.0, 1 - float(part["differ"].mean()) * max(entropy, 1e-3) ** -3)


def score_window(part: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return truth and estimates (adapted, source) of one window."""
    keys = ("source", "source_again", "adapted", "beside", "labels", "adapted_alike", "early_alike")
    of = {key: torch.from_numpy(part[key]) for key in keys}
    guess = {key: of[key].argmax(dim=1) for key in ("source", "source_again", "adapted", "beside")}
    window = Window(of["source"], of["adapted"], guess["source"] == guess["source_again"],
                    guess["adapted"] == guess["beside"], of["adapted_alike"], of["early_alike"])  # fmt: skip
    found = accuracies(window, source.home, float(part["anchor"].mean()))
    numbers = compared(window, len(window), len(window), torch.as_tensor(part["shift"][-1])).tolist()
    blind = Comparison.read(len(window), numbers, EstimateSettings())
    both = {key: rivals(of[key], source) for key in ("adapted", "source")}
    estimates: dict[str, Any] = {name: (both["adapted"][name], both["source"][name]) for name in both["source"]}
    estimates |= {"AETTA": (aetta(part), None), "ours": found.shown}
    truth = [float((guess[key] == of["labels"]).double().mean()) for key in ("adapted", "source")]
    low, high = source.home.interval(found.shown[0], len(window))
    return {"truth": truth, "estimates": estimates, "covered": low <= truth[0] <= high, "width": high - low,
            "difference": found.difference, "blind": blind.difference}  # fmt: skip


def group(run: Run) -> str:
    """Return the kind of stream."""
    if run.method == "collapsing":
        return "collapsing"
    return ("clean" if run.corruption == "clean" else "shifted") if run.order == "shuffled" else "not shuffled"


def score(out: Path, target: Path) -> None:
    """Score everything that is recorded, by part and kind of stream, and write the means."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    sources: dict[str, Source] = {}
    for run in DESIGN + REPORT + FRESH:
        path = out / f"{run.name}.npz"
        if not path.exists():
            continue
        if run.network not in sources:
            sources[run.network] = Source.read(out / f"{run.network}-home.npz")
        source = sources[run.network]
        part = "design" if run in DESIGN else "fresh" if run in FRESH else run.network
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        for start in range(0, len(arrays["labels"]) - WINDOW // 2 + 1, WINDOW):
            window = {key: value[start : start + WINDOW] for key, value in arrays.items()}
            found.setdefault((part, group(run)), []).append(score_window(window, source))
    for (part, kind), windows in list(found.items()):
        if part not in ("design", "fresh"):
            found.setdefault(("held out", kind), []).extend(windows)
        if part != "design":
            found.setdefault((part if part == "fresh" else "held out", "all"), []).extend(windows)
    rows = [summary(part, kind, windows) for (part, kind), windows in found.items()]
    about = {"window": WINDOW, "labelled": HOME, "torch": torch.__version__} | origin(COMMAND) | {"rows": rows}
    target.write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


def summary(part: str, kind: str, windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean absolute errors in points for adapted and source model, coverage, and signs that are right."""
    errors: dict[str, list[float | None]] = {}
    for name in windows[0]["estimates"]:
        sides: list[float | None] = []
        for side in (0, 1):
            known = [(w["estimates"][name][side], w["truth"][side]) for w in windows]
            missing = known[0][0] is None
            sides.append(None if missing else round(100 * float(np.mean([abs(a - b) for a, b in known])), 1))
        errors[name] = sides
    clear = [w for w in windows if abs(w["truth"][0] - w["truth"][1]) >= 0.02]  # smaller differences are noise
    signs = {key: [(w[key] > 0) == (w["truth"][0] > w["truth"][1]) for w in clear] for key in ("difference", "blind")}
    return {
        "part": part, "kind": kind, "windows": len(windows), "errors": errors,
        "coverage": round(100 * float(np.mean([w["covered"] for w in windows]))),
        "width": round(50 * float(np.mean([w["width"] for w in windows])), 1),
        "clear": len(clear), "right": sum(signs["difference"]),
        "right_without_labels": sum(signs["blind"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/estimate"))
    parser.add_argument("--only", help="record only the runs of this network")
    parser.add_argument("--score", action="store_true", help="record nothing")
    parser.add_argument("--target", type=Path, default=Path("docs/results/data/estimate.json"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for run in [] if args.score else DESIGN + REPORT + FRESH:
        if args.only in (None, run.network):
            record_home(run.network, args.out)
            record(run, args.out)
    score(args.out, args.target)


if __name__ == "__main__":
    main()
