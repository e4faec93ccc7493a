"""Weights from a file into a network: everything is checked before the first tensor is copied."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from dpl.backbones.checkpoint import Checkpoint, read_checkpoint
from dpl.backbones.normalise import Normalized
from dpl.core.errors import DataError

__all__ = ["LoadReport", "load_weights"]

_PREFIXES = ("module.", "model.", "network.")
# PyTorch spells weight norm in two ways, by hooks and by parametrizations; a file may have the other one.
_HOOKS = (".weight_g", ".weight_v")
_PARAMETRIZATIONS = (".parametrizations.weight.original0", ".parametrizations.weight.original1")
_WEIGHT_NORM = (*zip(_HOOKS, _PARAMETRIZATIONS, strict=True), *zip(_PARAMETRIZATIONS, _HOOKS, strict=True))
_Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did: how many tensors it copied, and the names that found no partner."""

    loaded: int
    missing: tuple[str, ...]
    """In the network, not in the file."""
    unexpected: tuple[str, ...]
    """In the file, not in the network."""
    mismatched: tuple[str, ...]
    """In both, with different shapes."""


def load_weights(network: nn.Module, path: str | Path, *, strict: bool = True, by_position: bool = False) -> LoadReport:
    """Load the tensors of a checkpoint file into `network`.

    Names are matched after the prefixes that wrappers leave (`module.`, `model.`, `network.`) are taken off. With
    `strict` every tensor of the network must be in the file, in its shape, and nothing else; otherwise what fits
    is loaded and the report names the rest, as when only the body of a network with another head is wanted.
    `by_position` ignores the names: the n-th tensor of the file goes to the n-th of the network, if all shapes
    and kinds (weight, bias, running_mean ...) agree.
    """
    target = network.network if isinstance(network, Normalized) else network
    expected = {name: value for name, value in target.state_dict().items() if isinstance(value, Tensor)}
    file = read_checkpoint(path)
    found = _by_position(file, expected, path) if by_position else _by_name(file.tensors, expected, path)
    fitting = {n: t for n, t in found.items() if n in expected and t.shape == expected[n].shape}
    report = _compare(found, expected, len(fitting))
    complete = not (report.missing or report.unexpected or report.mismatched)
    if not fitting or (strict and not complete):
        raise DataError(_misfit(report, file, found, expected, path))
    target.load_state_dict(_finite(fitting, expected, path), strict=False)
    return report


def _by_name(tensors: _Tensors, expected: _Tensors, path: str | Path) -> dict[str, Tensor]:
    found = {_translate(name, expected): tensor for name, tensor in tensors.items()}
    if len(found) != len(tensors):
        raise DataError(
            f"{path} holds several versions of one tensor under different prefixes; save one of them alone."
        )
    return found


def _translate(name: str, expected: _Tensors) -> str:
    bare = name
    while bare not in expected and bare.startswith(_PREFIXES):
        bare = bare.partition(".")[2]
    for ending, other in _WEIGHT_NORM:
        renamed = bare.removesuffix(ending) + other
        if bare.endswith(ending) and renamed in expected:
            return renamed
    return bare


def _by_position(file: Checkpoint, expected: _Tensors, path: str | Path) -> dict[str, Tensor]:
    if not file.ordered:
        raise DataError(f"by_position: {path} is a safetensors file, which keeps no order; load it by name.")
    if not _agree_in_order(file.tensors, expected):
        raise DataError(
            f"by_position: {path} has {len(file.tensors)} tensors, the network {len(expected)}, and they do not "
            "agree in shape and kind one by one; load it by name, into the architecture it was saved from."
        )
    return dict(zip(expected, file.tensors.values(), strict=True))


def _agree_in_order(tensors: _Tensors, expected: _Tensors) -> bool:
    signatures = [
        [(name.rpartition(".")[2], tuple(tensor.shape)) for name, tensor in state.items()]
        for state in (tensors, expected)
    ]
    return signatures[0] == signatures[1]


def _compare(found: _Tensors, expected: _Tensors, loaded: int) -> LoadReport:
    # Files older than BatchNorm's step counter lack it; nothing but cumulative averaging ever reads it.
    missing = [n for n in expected if n not in found and not n.endswith("num_batches_tracked")]
    mismatched = [n for n in found if n in expected and found[n].shape != expected[n].shape]
    unexpected = [n for n in found if n not in expected]
    return LoadReport(loaded, tuple(missing), tuple(unexpected), tuple(mismatched))


def _misfit(report: LoadReport, file: Checkpoint, found: _Tensors, expected: _Tensors, path: str | Path) -> str:
    shapes = [f"{n} {list(found[n].shape)} (network: {list(expected[n].shape)})" for n in report.mismatched]
    parts = [
        f"{len(names)} {what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (
            ("missing", report.missing),
            ("not in the network", report.unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    return f"{path} does not fit the network: {'; '.join(parts)}. {_advice(report, file, found, expected)}"


def _advice(report: LoadReport, file: Checkpoint, found: _Tensors, expected: _Tensors) -> str:
    heads = {
        (found[n].shape[0], expected[n].shape[0])
        for n in report.mismatched
        if found[n].ndim and expected[n].ndim and found[n].shape[1:] == expected[n].shape[1:]
    }
    if len(heads) == 1 and not (report.missing or report.unexpected):
        ((classes, _),) = heads
        return f"The head differs: use num_classes={classes}, or strict=False to keep the network's own head."
    if file.ordered and _agree_in_order(file.tensors, expected):
        return "Names differ, but shapes agree in order: by_position=True loads it."
    if report.loaded >= 0.8 * len(expected):
        return "Most of it fits: strict=False loads that part and reports the rest."
    return "It comes from another architecture: create the network under the name that was trained."


def _finite(tensors: _Tensors, expected: _Tensors, path: str | Path) -> dict[str, Tensor]:
    """Return the tensors in the network's dtype; refuse what is not finite there."""
    cast = {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}
    for name, tensor in cast.items():
        if not tensor.isfinite().all():
            raise DataError(f"{path}: {name} holds non-finite values; the training that made the file diverged.")
    return cast
