from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save anything with torch.save and return the path."""

    def save(content: object, name: str = "weights.pth", **options: bool) -> Path:
        path = tmp_path / name
        torch.save(content, path, **options)
        return path

    return save


@pytest.fixture
def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))
