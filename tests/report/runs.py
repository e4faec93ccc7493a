"""Small real runs for the tests of the report: a benchmark of two domains and two seeds, and a folder adapted to."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.tiny import make_weights, write_yaml
from data.make import make_folder, make_pacs
from dpl.backbones import create
from dpl.cli import main

METHODS = {"source": {}, "tent": {}, "dpl": {}, "dpl_slow": {"method": "dpl", "lr": "1e-5"}}
TARGETS = ("art_painting", "sketch")
CLASSES = ("circle", "square", "triangle")


def make_store(root: Path) -> Path:
    """Run a tiny benchmark on made images; the results are in `root/store`, the images in `root/data`."""
    make_pacs(root / "data", per_class=8)
    make_weights(root / "weights" / "pacs.safetensors", 7)
    experiment = {
        "title": "tiny", "dataset": "pacs", "protocol": "leave_one_domain_out", "targets": list(TARGETS),
        "network": "debug_cnn", "weights": "{weights}/pacs.safetensors", "transform": "square 32", "batch_size": 8,
        "seeds": [0, 1], "settings": {"lr": "1e-3", "confidence": 0.2}, "methods": METHODS,
    }  # fmt: skip
    write_yaml(root / "tiny.yaml", experiment)
    assert bench(root, root / "store") == 0
    return root / "store"


def bench(root: Path, out: Path, *more: str) -> int:
    words = ["--data", str(root / "data"), "--weights", str(root / "weights"), "--out", str(out), "--threads", "1"]
    return main(["bench", str(root / "tiny.yaml"), *words, "--json", *more])


def make_adapted(root: Path, *more: str, flat: bool = True) -> Path:
    """Adapt to a folder of made images; return the predictions file."""
    make_folder(root, labelled=not flat, classes=CLASSES, per_class=20)
    torch.manual_seed(0)
    network = create("debug_cnn", num_classes=3, normalise="none")
    network.fc.weight.data.mul_(20)  # bold, so that answers differ
    save_file(network.state_dict(), root / "mine.safetensors")
    (root / "names.txt").write_text("\n".join(CLASSES))
    return adapt(root, "predictions", "--method", "dpl", "--set", "confidence=0.2", *more)


def adapt(root: Path, name: str, *more: str) -> Path:
    """Adapt to the folder that `make_adapted` made; return the predictions file."""
    words = ["--model", "debug_cnn", "--weights", str(root / "mine.safetensors"), "--images", str(root / "mine")]
    out = root / "out" / f"{name}.csv"
    words += ["--classes", str(root / "names.txt"), "--batch-size", "8", "--out", str(out), "--json"]
    assert main(["adapt", *words, *more]) == 0
    return out


def write_predictions(root: Path, right: int, right_by_source: int, total: int) -> Path:
    """Write a predictions file on whose first images the adapted and the source model are right; return it."""
    lines = [f"{i}.png,{int(i >= right)},,0.5,a,{int(i >= right_by_source)}" for i in range(total)]
    file = root / "p.csv"
    file.write_text("\n".join(["image,predicted,name,confidence,label,source", *lines]) + "\n")
    file.with_suffix(".run.json").write_text(json.dumps({"method": "dpl", "classes": ["a", "b"], "total": total}))
    return file


def write_many_classes(root: Path) -> Path:
    """Write predictions for 1,000 classes: the source model is right, the adapted one takes 700 to 709 for 42."""
    rows = [(i, 42 if i in range(700, 710) else i, i) for _ in range(2) for i in range(1000)]
    lines = [f"{k}.png,{after},,0.5,class {truth},{truth}" for k, (truth, after, _) in enumerate(rows)]
    file = root / "many.csv"
    file.write_text("\n".join(["image,predicted,name,confidence,label,source", *lines]) + "\n")
    names = [f"class {number}" for number in range(1000)]
    file.with_suffix(".run.json").write_text(json.dumps({"method": "dpl", "classes": names, "total": len(rows)}))
    return file


def write_guarded(root: Path) -> Path:
    """Write predictions of a run with batches of 8 in which the guard acted after batch 3 and batch 9."""
    file = write_predictions(root, 50, 60, 100)
    record = json.loads(file.with_suffix(".run.json").read_text())
    names = {3: "roll_back", 9: "freeze"}
    events = [
        {"batch": batch, "action": action, "reason": "lost", "alarm": action == "freeze"}
        for batch, action in names.items()
    ]
    file.with_suffix(".run.json").write_text(json.dumps(record | {"batch_size": 8, "guard": True, "events": events}))
    return file
