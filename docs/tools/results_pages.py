"""Data pages from the measured figures in docs/results/data."""

import json
from pathlib import Path
from typing import Any

from tools.markdown import render

__all__ = ["devices_page", "estimate_page", "parity_page", "speed_page"]

_NETWORKS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "mobilenet_v2": "MobileNetV2",
    "vit_small": "ViT-S/16",
    "resnet20": "CIFAR ResNet-20",
}


def parity_page(file: Path) -> str:
    """Return the page of the comparison with other code as Markdown."""
    found = json.loads(file.read_text())
    rows = [
        [f"`{run['name']}`", run["code"], *(_shown(run[key]) for key in ("logits", "state"))] for run in found["runs"]
    ]
    return render("parity.md.jinja", rows=rows, about=found)


_PARTS = {
    "design": "ResNet-20, CIFAR-10 (design)",
    "resnet56": "ResNet-56, CIFAR-10",
    "cifar100": "ResNet-32, CIFAR-100",
    "held out": "both of these",
    "fresh": "WRN-28-1 and CIFAR-100 (fresh)",
}


def estimate_page(file: Path) -> str:
    """Return the page of the label-free estimates of accuracy as Markdown."""
    found = json.loads(file.read_text())
    names = ["ATC", "DoC", "AETTA", "COT", "ours"]
    errors, decisions = [], []
    for row in found["rows"]:
        about = [_PARTS[row["part"]], row["kind"], str(row["windows"])]
        errors.append([*about, *(" / ".join(map(_points, row["errors"][name])) for name in names)])
        signs = [f"{row[key]} of {row['clear']}" for key in ("right", "right_without_labels")]
        decisions.append([*about, f"{row['coverage']} %", f"{row['width']:.1f}", *signs])
    return render("estimate.md.jinja", names=names, errors=errors, decisions=decisions, about=found)


def _points(error: float | None) -> str:
    return "–" if error is None else f"{error:.1f}"


def devices_page(file: Path, other: Path) -> str:
    """Return the page of what every method does on a device as Markdown."""
    numbers, columns = ("reads", "guard", "estimate"), ("moves", "bfloat16", "float16")
    found = json.loads(file.read_text())
    rows = [
        [f"`{row['method']}`", *(row[key] for key in numbers), *("yes" if row[key] else "no" for key in columns)]
        for row in found["rows"]
    ]
    compared = json.loads(other.read_text()) if other.exists() else {"rows": {}}
    there = [_on_other_device(task, row) for task, row in compared["rows"].items()]
    return render("devices.md.jinja", rows=rows, about=found, there=there, about_other=compared)


def _on_other_device(task: str, row: dict[str, Any]) -> list[str]:
    name, _, guarded = task.partition(" ")
    name = f"`{name}`, guarded" if guarded else f"`{name}`"
    if "error" in row:
        return [name, "–", "–", "–", "–", row["error"]]
    same = "yes" if all(row["exact"]) and row["events"] else "no"
    return [name, *(_shown(row[key]) for key in ("logits", "state", "to_device", "to_cpu")), same]


def _shown(difference: float | None) -> str:
    return "–" if difference is None else f"{difference:.0e}"


def speed_page(file: Path, late_start: Path) -> str:
    """Return the page of speed and memory of every method as Markdown."""
    found, late = json.loads(file.read_text()), json.loads(late_start.read_text())
    rows = [row for row in found["rows"] if "ours" in row]
    networks = []
    for key, title in _NETWORKS.items():
        own = sorted((row for row in rows if row["network"] == key), key=lambda row: str(row["method"]))
        if own:
            networks.append((f"{title} ({own[0]['size']} pixels, batch {own[0]['batch']})", list(map(_speed_row, own))))
    styled = [
        [_NETWORKS[row["network"]], f"`{row['method']}`", f"{row['ours'] / row['dpl']:.2f}"]
        for row in rows
        if "dpl" in row
    ]
    late_rows = [[name, f"{accuracy:.1f}", f"{cost:.2f}"] for name, accuracy, cost in late["rows"]]
    return render("speed.md.jinja", networks=networks, styled=styled, about=found, late=late, late_rows=late_rows)


def _speed_row(row: dict[str, Any]) -> list[str]:
    """Return one method: its speed, its cost relative to inference, to a training step and to the reference."""
    reference = "usual" if "usual" in row else "plain"
    return [
        f"`{row['method']}`",
        f"{1e3 / row['ours']:,.1f}",
        f"{row['ours'] / row['source']:.2f}",
        f"{row['ours'] / row['floor']:.2f}" if "floor" in row else "–",
        f"{row[reference] / row['ours']:.2f}" + ("" if reference == "usual" else "\\*"),
        f"{row['peak_ours']:,.0f}",
        f"{row[f'peak_{reference}']:,.0f}",
        str(row["rounds"]),
    ]
