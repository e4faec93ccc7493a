"""A plot of the learning curve."""

from pathlib import Path
from typing import Any

from dpl.core.errors import MissingExtraError
from dpl.core.extras import optional

__all__ = ["draw_curves"]


def draw_curves(history: list[dict[str, Any]], title: str, path: Path) -> bool:
    """Draw loss and validation accuracy over the steps; return False if matplotlib is not installed."""
    try:
        figure = optional("matplotlib.figure", "bench").Figure(figsize=(9, 3.5), layout="constrained")
    except MissingExtraError:
        return False
    steps = [entry["step"] for entry in history]
    best = max(history, key=lambda entry: entry["mean"])
    losses, accuracies = figure.subplots(1, 2)
    losses.plot(steps, [entry["loss"] for entry in history], color="black")
    losses.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    for domain in history[0]["validation"]:
        accuracies.plot(steps, [entry["validation"][domain] for entry in history], label=domain, linewidth=1)
    accuracies.plot(steps, [entry["mean"] for entry in history], label="mean", color="black", linewidth=2)
    accuracies.axvline(best["step"], color="grey", linestyle=":", label=f"kept: step {best['step']}")
    accuracies.set(xlabel="step", ylabel="source validation accuracy, %")
    accuracies.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    return True
