"""Weights from a file into a network. Files cannot run code, and everything is checked before a tensor is copied.

The format is detected from the file's first bytes. A misnamed file still loads, and a web page saved under the name of
a checkpoint is reported as such.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpl.backbones.normalise import bare
from dpl.backbones.pretrained import is_pretrained_folder
from dpl.core.errors import DataError

__all__ = ["LoadReport", "load_weights", "read_checkpoint"]

_ACCEPTED = "accepted are .safetensors, and .pth, .pt, .th, .tar or .bin files of torch.save that hold tensors only"
_WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net")
_PREFIXES = ("module.", "model.", "network.")
# PyTorch spells weight norm in two ways, by hooks and by parametrizations; a file may have the other one.
_SPELLINGS = [(".weight_g", ".parametrizations.weight.original0"), (".weight_v", ".parametrizations.weight.original1")]
_SPELLINGS += [(new, old) for old, new in _SPELLINGS]
_Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LoadReport:
    """Result of `load_weights`: the number of tensors copied, and the names without a counterpart."""

    loaded: int
    missing: tuple[str, ...]  # in the network, not in the file
    unexpected: tuple[str, ...]  # in the file, not in the network
    mismatched: tuple[str, ...]  # in both, with different shapes


def load_weights(network: nn.Module, path: str | Path, *, strict: bool = True) -> LoadReport:
    """Load the tensors of a checkpoint file into `network`.

    Names are matched without the prefixes of wrappers (`module.`, `model.`, `network.`). With `strict`, the file must
    contain every tensor of the network in its shape, and no other. Otherwise the fitting tensors are loaded and the
    report names the rest, such as a head for other classes.
    """
    target = bare(network)
    expected = {name: value for name, value in target.state_dict().items() if isinstance(value, Tensor)}
    found = _by_name(read_checkpoint(path), expected, path)
    fitting = {n: t for n, t in found.items() if n in expected and t.shape == expected[n].shape}
    report = LoadReport(
        loaded=len(fitting),
        # Old files lack BatchNorm's step counter; only cumulative averaging reads it.
        missing=tuple(n for n in expected if n not in found and not n.endswith("num_batches_tracked")),
        unexpected=tuple(n for n in found if n not in expected),
        mismatched=tuple(n for n in found if n in expected and n not in fitting),
    )
    if not fitting or (strict and (report.missing or report.unexpected or report.mismatched)):
        raise DataError(_misfit(report, found, expected, path))
    cast = {name: tensor.to(expected[name].dtype) for name, tensor in fitting.items()}
    for name, tensor in cast.items():
        if not tensor.isfinite().all():
            raise DataError(f"{path}: {name} holds non-finite values; the training that made the file diverged.")
    target.load_state_dict(cast, strict=False)
    return report


def _by_name(tensors: _Tensors, expected: _Tensors, path: str | Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        while name not in expected and name.startswith(_PREFIXES):
            name = name.partition(".")[2]
        spelled = (name.removesuffix(old) + new for old, new in _SPELLINGS if name.endswith(old))
        found[next((other for other in spelled if other in expected), name)] = tensor
    if len(found) != len(tensors):
        raise DataError(f"{path} holds several versions of a tensor under different prefixes; save one of them alone.")
    return found


def _misfit(report: LoadReport, found: _Tensors, expected: _Tensors, path: str | Path) -> str:
    """Return what does not fit, and what to do."""
    shapes = [f"{n} {list(found[n].shape)} (network: {list(expected[n].shape)})" for n in report.mismatched]
    differences = {"missing": report.missing, "not in the network": report.unexpected, "of another shape": shapes}
    parts = [
        f"{len(names)} {what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in differences.items()
        if names
    ]
    pairs = [(found[n].shape, expected[n].shape) for n in report.mismatched]
    heads = {(own[0], other[0]) for own, other in pairs if own and other and own[1:] == other[1:]}
    if is_pretrained_folder(folder := Path(path).parent):
        advice = _name_it(folder)
    elif len(heads) == 1 and not (report.missing or report.unexpected):
        advice = f"The head differs: use num_classes={heads.pop()[0]}, or strict=False to keep the network's own head."
    elif report.loaded >= 0.8 * len(expected):
        advice = "Most of it fits: strict=False loads that part and reports the rest."
    else:
        advice = "It comes from another architecture: create the network under the name that was trained."
    return f"{path} does not fit the network: {'; '.join(parts)}. {advice}"


def _name_it(folder: Path) -> str:
    return f"{folder} is a model of transformers, network and weights in one: give --model {folder} without --weights."


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file; raise DataError, naming the file, for anything else."""
    path = Path(path)
    if is_pretrained_folder(path):
        raise DataError(f"weights: {_name_it(path)}")
    if not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"weights: {path} {kind}; give the path of a checkpoint ({_ACCEPTED}).")
    with path.open("rb") as file:
        head = file.read(512)
    safe = head[8:9] == b"{"  # after the length of the header of a safetensors file
    if not safe and not head.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, or a pickle of old torch.save
        raise DataError(f"{path} is {_describe(head)}; {_ACCEPTED}.")
    try:
        content = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # untrusted bytes make the readers fail in many ways; all mean the same
        raise DataError(f"{path} {_why_refused(error)}") from error
    tensors = content if safe else _unwrap(content, path)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise DataError(f"{path}: {name} is sparse, quantized or without values; expected plain tensors.")
    return tensors


def _describe(head: bytes) -> str:
    if not head:
        return "empty: the download failed"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return "a web page, not a checkpoint: the download failed (open it in a browser to see why)"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself: run `git lfs pull` where it came from"
    return "no checkpoint, or damaged in its first bytes"


def _why_refused(error: Exception) -> str:
    message = str(error)
    if type(error).__name__ != "UnpicklingError" and "weights_only" not in message:
        detail = message.splitlines()[0] if message else "it ends early"
        return f"is truncated, damaged or no checkpoint ({detail}); fetch it again."
    culprit = re.search(r"GLOBAL ([\w.]+)", message)
    return (
        f"holds more than tensors{f' ({culprit[1]})' if culprit else ''}, and files are never allowed to run code; "
        f"{_ACCEPTED}. If you trust it, load it once elsewhere and save its state dict alone."
    )


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict, without what training scripts save around it: epoch, optimizer, arguments."""
    if isinstance(content, Mapping):
        for key in _WRAPPERS:
            if isinstance(content.get(key), Mapping):
                return _unwrap(content[key], path)
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise DataError(f"{path} holds no state dict; expected tensors by name, alone or under {', '.join(_WRAPPERS)}.")
