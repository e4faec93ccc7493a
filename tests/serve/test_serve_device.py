"""Where images go before a step, decided without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpl.serve.live import _like_model
from nets import RecordedImages


@pytest.mark.parametrize(("device", "calls"), [("cpu", [("cpu", False)]), ("cuda", ["pin_memory", ("cuda", True)])])
def test_images_go_to_a_gpu_from_pinned_memory_in_the_model_s_precision(device: str, calls: list[object]) -> None:
    like = SimpleNamespace(device=torch.device(device), dtype=torch.float64)
    model: Any = SimpleNamespace(model=SimpleNamespace(parameters=lambda: iter([like])))
    images: Any = RecordedImages()
    _like_model(images, model)
    assert images.calls == [("torch.float64", False), *calls]
