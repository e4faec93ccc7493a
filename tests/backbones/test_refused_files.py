"""Files that are no checkpoints, or hold more than tensors, are refused by name; none of them runs code."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from dpl.backbones import load_weights
from dpl.core.errors import DataError


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><html><title>Google Drive - Quota exceeded</title>", "web page.*download failed"),
        (b"\n  <HTML><body>404", "web page.*download failed"),
        (b"\xef\xbb\xbf<?xml version='1.0'?><Error>AccessDenied</Error>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-lfs pointer"),
        (b"", "is empty"),
        (b"PK", "no checkpoint, or damaged"),
        (b"just a text file", "no checkpoint, or damaged"),
    ],
)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_what_downloads_leave_behind(content, message, name, small, tmp_path):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        load_weights(small, path)
    assert str(path) in str(caught.value)
    assert ".safetensors" in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write_as", ["zip", "legacy", "pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(write_as, small, tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "evil.pt"
    content = {"state_dict": small.state_dict(), "extra": Payload(marker)}
    if write_as == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=write_as == "zip")
    with pytest.raises(DataError, match=r"holds more than tensors.*never allowed to run code"):
        load_weights(small, path)
    assert not marker.exists()
    if write_as == "pickle":  # the payload is alive: a trusting reader does run it
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert marker.exists()


def test_whole_modules_are_refused_naming_the_class(small, saved):
    with pytest.raises(DataError, match=r"Sequential.*save its state dict alone"):
        load_weights(small, saved(small))


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {"state_dict": {"lr": 0.1}}, torch.zeros(3)])
def test_files_without_a_state_dict_are_refused(content, small, saved):
    with pytest.raises(DataError, match="no state dict"):
        load_weights(small, saved(content))


def test_sparse_tensors_are_refused(small, saved):
    state = small.state_dict()
    state["3.weight"] = state["3.weight"].to_sparse()
    with pytest.raises(DataError, match=r"3\.weight is sparse"):
        load_weights(small, saved(state))


def test_missing_files_and_folders_are_named(small, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_weights(small, tmp_path / "nothing.pth")
    with pytest.raises(DataError, match="is a folder"):
        load_weights(small, tmp_path)


def formats(folder: Path) -> dict[str, bytes]:
    torch.manual_seed(0)
    network = nn.Linear(6, 4)
    torch.save(network.state_dict(), folder / "zip")
    torch.save(network.state_dict(), folder / "legacy", _use_new_zipfile_serialization=False)
    save_file(network.state_dict(), folder / "safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_truncated_file_is_refused_at_any_length(kind, tmp_path):
    whole = formats(tmp_path)[kind]
    network = nn.Linear(6, 4)
    before = network.weight.clone()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        path = write(tmp_path / "cut.pth", whole[:length])
        with pytest.raises(DataError):
            load_weights(network, path)
    assert torch.equal(network.weight, before)
    load_weights(network, write(tmp_path / "cut.pth", whole))
    assert not torch.equal(network.weight, before)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_byte_never_gives_anything_but_weights_or_the_refusal(kind, data, tmp_path):
    whole = bytearray(formats(tmp_path)[kind])
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    network = nn.Linear(6, 4)
    path = write(tmp_path / "damaged.pth", bytes(whole))
    try:
        load_weights(network, path)
    except DataError:
        pass
    finally:
        path.unlink()
    assert network.weight.isfinite().all()
