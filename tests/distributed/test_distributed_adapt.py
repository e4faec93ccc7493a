"""Two processes with a part of every batch each hold the model that one process with all of it holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dpl
from distributed.pairs import torchrun
from distributed.subjects import CASES, make_network, make_source, make_stream
from dpl import distributed
from dpl.errors import SettingError


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """What two processes saved of every case."""
    out = tmp_path_factory.mktemp("together")
    torchrun("adapt_program.py", str(out))
    return out


@pytest.mark.parametrize("name", CASES)
def test_two_processes_hold_the_model_of_one(name, together):
    method, settings, kind = CASES[name]
    options = {key: value for key, value in settings.items() if key != "source"}
    source = make_source() if "source" in settings else None
    alone = dpl.adapt(make_network(kind), method, source=source, **options)
    before = alone.state_dict()
    logits = [alone(batch) for batch in make_stream()]
    after = alone.state_dict()
    first, second = (load_file(together / f"{name}.{rank}") for rank in (0, 1))
    for key, value in after.items():
        torch.testing.assert_close(first[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
        assert torch.equal(first[key], second[key]), key
    for place, rows in enumerate(logits):
        joined = torch.cat([first[f"logits.{place}"], second[f"logits.{place}"]])
        torch.testing.assert_close(joined, rows, rtol=1e-5, atol=1e-5)
    moved = max(float((after[f"model.{key}"] - before[f"model.{key}"]).abs().max()) for key in alone.trainable)
    assert moved > 1e-4, "nothing was learnt: the comparison would say nothing"


def test_without_torchrun_the_error_says_how_to_start():
    with pytest.raises(SettingError, match="torchrun"):
        distributed.adapt(make_network("batch"), "dpl")
    with distributed.started() as team:
        assert team is None
