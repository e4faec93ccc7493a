"""Reading weight files that strangers made: tensors or a clear refusal, never code.

The format is told from the file's first bytes, so a misnamed file still loads and a web page saved under a
checkpoint's name is called what it is.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from dpl.core.errors import DataError

__all__ = ["Checkpoint", "read_checkpoint"]

ACCEPTED = "accepted are .safetensors, and .pth, .pt, .th, .tar or .bin files of torch.save that hold tensors only"
_WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net")
_LARGEST_HEADER = 100_000_000  # the safetensors format's own limit


class Checkpoint(NamedTuple):
    """The named tensors of a file, and whether their order is that of the network which was saved."""

    tensors: dict[str, Tensor]
    ordered: bool


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the tensors of a weight file; raise DataError, naming the file, for anything else."""
    path = Path(path)
    head = _first_bytes(path)
    if _is_safetensors(head):
        checkpoint = Checkpoint(_read_safetensors(path), ordered=False)
    elif head.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, or a pickle as torch.save once wrote
        checkpoint = Checkpoint(_unwrap(_read_torch(path), path), ordered=True)
    else:
        raise DataError(f"{path} is {_describe(head)}; {ACCEPTED}.")
    _check_plain(checkpoint.tensors, path)
    return checkpoint


def _first_bytes(path: Path) -> bytes:
    if not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"weights: {path} {kind}; give the path of a checkpoint ({ACCEPTED}).")
    with path.open("rb") as file:
        return file.read(512)


def _is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _LARGEST_HEADER


def _describe(head: bytes) -> str:
    if not head:
        return "empty: the download failed"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return "a web page, not a checkpoint: the download failed (open it in a browser to see why)"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself: run `git lfs pull` where it came from"
    return "no checkpoint, or damaged in its first bytes"


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # as below
        raise DataError(f"{path} is truncated, damaged or no checkpoint ({error}); fetch it again.") from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes of a stranger make the reader fail in many ways; all mean the same
        raise DataError(f"{path} {_why_refused(error)}") from error


def _why_refused(error: Exception) -> str:
    message = str(error)
    if type(error).__name__ != "UnpicklingError" and "weights_only" not in message:
        detail = message.splitlines()[0] if message else "it ends early"
        return f"is truncated, damaged or no checkpoint ({detail}); fetch it again."
    culprit = re.search(r"GLOBAL ([\w.]+)", message)
    return (
        f"holds more than tensors{f' ({culprit[1]})' if culprit else ''}, and files are never allowed to run code; "
        f"{ACCEPTED}. If you trust it, load it once elsewhere and save its state dict alone."
    )


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """Find the state dict in what training scripts save around it: epoch, optimizer, arguments."""
    if isinstance(content, Mapping):
        for key in _WRAPPERS:
            if isinstance(content.get(key), Mapping):
                return _unwrap(content[key], path)
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise DataError(f"{path} holds no state dict; expected tensors by name, alone or under {', '.join(_WRAPPERS)}.")


def _check_plain(tensors: Mapping[str, Tensor], path: Path) -> None:
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise DataError(f"{path}: {name} is sparse, quantized or without values; expected plain tensors.")
