"""Measured rows as the benchmark engine returns them, without a run behind them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measured_row(label, dataset, domain, accuracy, *, seed=0, n=100, severity=None, source=None, **changed):
    """One segment; whatever a test does not ask about has the value of a plain run on ResNet-50."""
    row = {
        "section": dataset, "label": label, "column": f"{source}->{domain}" if source else domain, "chosen": {},
        "dataset": dataset, "domains": [domain], "severity": severity, "corrupt": None, "part": "inside",
        "holdout": 0.2, "limit": None, "transform": "square 224", "protocol": "reset_each_shift", "order": "numpy",
        "batch_size": 32, "seed": seed, "network": "resnet50", "weights": "0123456789abcdef", "method": label,
        "settings": {"lr": 5e-5, "seed": seed}, "n": n, "accuracy": accuracy, "error": 100 - accuracy,
        "regenerated": False, "data_notes": [], "versions": {"dpl": "0.1.0", "torch": "2.13.0"},
        "trainable_values": 1234, "source_data": "none",
    }  # fmt: skip
    row["unit"] = f"{label} {dataset} {row['column']} {severity} {seed}"
    return row | changed


@pytest.fixture
def make_row():
    return measured_row
