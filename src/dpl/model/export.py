"""The adapted network as a plain one: no `dpl`, no adaptation, fixed statistics.

Weights are those of the network that predicts now. Running statistics of BatchNorm layers become what adaptation
normalised with: themselves, or their blend with the average of recent batches (`network.target_statistics`). A
classifier that a method made (T3A's templates) takes the place of the network's. The file is read back and compared
with the adapted model.
"""

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

import dpl
from dpl.core.errors import InputError, ModelError, SettingError
from dpl.core.extras import optional
from dpl.core.files import write_file, write_folder
from dpl.methods.base import Method
from dpl.network.norm import uninstall
from dpl.network.split import logits_of, private_copy
from dpl.network.target_statistics import RECENT

if TYPE_CHECKING:
    from dpl.model.adaptive import AdaptiveModel

__all__ = ["ExportFormat", "Exported", "export", "plain_network", "reason_not_to_export"]

ExportFormat = Literal["state_dict", "onnx", "torch_export"]
_ENDINGS = {"state_dict": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}
_RECORD = "export.json"


@dataclass(frozen=True)
class Exported:
    """An exported file, usable as a path, and how well it agrees with the adapted model."""

    path: Path
    format: str
    method: str
    statistics: str  # where the BatchNorm statistics come from
    agreement: float | None = None  # share of images with the adapted model's prediction; None: not compared
    images: int = 0  # that were compared

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        compared = "not compared: no images at hand"
        if self.agreement is not None:
            compared = f"{100 * self.agreement:.1f} % of {self.images} images predicted as by the adapted model"
        return f"{self.path} ({self.statistics}; {compared})"


def export(model: "AdaptiveModel", path: Path, format: ExportFormat, images: Tensor | None = None) -> Exported:
    """Write the plain network to a file or folder, read it back, and compare."""
    if format not in _ENDINGS:
        raise SettingError(f"format={format!r}: expected one of {', '.join(map(repr, get_args(ExportFormat)))}")
    target = _target(path, _ENDINGS[format])
    network, statistics = plain_network(model.method)
    images = _finite(model.last_images if images is None else images)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / target.name
        run = _WRITERS[format](network, draft, _example(model, images, format))
        result = Exported(target, format, model.method.info.name, statistics)
        if images is not None:
            result = replace(result, agreement=_agreement(model, run, images), images=len(images))
        _write(path, draft.read_bytes(), result, model)
    return result


def plain_network(method: Method[Any]) -> tuple[nn.Module, str]:
    """Return a plain copy of the network that predicts, and where its BatchNorm statistics come from."""
    reason = reason_not_to_export(method)
    if reason:
        raise ModelError(f"{method.info.name!r} cannot be exported: {reason}; model.save keeps the adaptive model")
    share = _share_of_batches(method)
    network, target = method.predicting, method.target_statistics
    copy = private_copy(network.module)
    uninstall(copy)
    batches = 0 if target is None or not share else min(target.batches, RECENT)
    if target is not None and batches:
        averages = target.by_layer(network.norm)
        for layer, plain in zip(network.module.modules(), copy.modules(), strict=True):
            if isinstance(layer, _BatchNorm) and layer in averages:
                mean, variance = averages[layer]
                plain.get_buffer("running_mean").lerp_(mean, share)
                plain.get_buffer("running_var").lerp_(variance, share)
    classifier = method.exported_classifier()
    if classifier is not None:
        _set_classifier(copy.get_submodule(str(network.classifier_name)), *classifier)
    return copy, _describe(share, batches)


def reason_not_to_export(method: Method[Any]) -> str:
    """Return why no plain network can give the method's predictions; empty if one can."""
    if method.no_export:
        return method.no_export
    kind, norm = type(method), method.predicting.norm
    stated = kind.predicting is not Method.predicting or kind.exported_classifier is not Method.exported_classifier
    if kind.predict is not Method.predict and not stated:
        return "its prediction is more than one network's output"
    if norm.layers and not hasattr(norm.rule, "target_share"):
        return f"its statistics ({type(norm.rule).__name__}) are made for each batch or image and cannot be fixed"
    return ""


def _share_of_batches(method: Method[Any]) -> float:
    """Return the share of batch statistics in those that normalise the usual batch."""
    rule: Any = method.predicting.norm.rule
    return 0.0 if method.target_statistics is None else rule.target_share(method.target_statistics.images)


def _describe(share: float, batches: int) -> str:
    if not share:
        return "running statistics"
    if not batches:
        return "running statistics, because no batch was seen yet"
    recent = f"statistics of {batches} recent batches"
    return recent if share == 1 else f"running statistics with {100 * share:g} % of the {recent}"


@torch.no_grad()
def _set_classifier(layer: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Give a linear layer, weight-normed or not, another weight and bias."""
    weight = weight.to(layer.weight.dtype)
    if hasattr(layer, "weight_v"):  # weight norm by hooks: length and direction
        layer.weight_g.copy_(weight.norm(dim=1, keepdim=True))
        layer.weight_v.copy_(weight)
    elif is_parametrized(layer, "weight"):
        layer.weight = weight
    else:
        layer.weight.copy_(weight)
    if bias is not None and layer.bias is None:
        raise ModelError("the method's classifier has a bias, the network's has none: no plain copy can hold it")
    if layer.bias is not None:
        layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)


def _finite(images: Tensor | None) -> Tensor | None:
    """Return the images without non-finite ones, which a guard excludes; None if nothing is left."""
    if images is None:
        return None
    kept = images[images.isfinite().flatten(1).all(dim=1)]
    return kept if len(kept) else None


def _example(model: "AdaptiveModel", images: Tensor | None, format: str) -> Tensor:
    """Return two images of the right shape: a tracer takes a batch of one for a constant."""
    shape = model.input_shape if images is None else images.shape[1:]
    if shape is None:
        if format == "state_dict":
            return torch.empty(0)
        raise InputError(f"format={format!r} needs the shape of an image: pass images=, or predict a batch first")
    return torch.zeros(2, *shape, device=model.device, dtype=model.network.dtype)


@torch.no_grad()
def _agreement(model: "AdaptiveModel", run: "Run", images: Tensor) -> float:
    expected = model.method.predict(images).argmax(dim=1)
    return float((run(images).argmax(dim=1).cpu() == expected.cpu()).float().mean())


def _target(path: Path, ending: str) -> Path:
    """Return the file to write: `path` with the format's ending, otherwise a file in the folder `path`."""
    if path.suffix == ending:
        return path
    if path.suffix in _ENDINGS.values():
        raise SettingError(f"path {path}: expected a file that ends in {ending}, or a folder")
    others = path.is_dir() and any(path.iterdir()) and not (path / _RECORD).is_file()
    if others or path.is_file():
        raise SettingError(f"path {path}: exists and is no export; choose another one")
    return path / f"model{ending}"


def _write(path: Path, data: bytes, result: Exported, model: "AdaptiveModel") -> None:
    if result.path == path:
        write_file(path, data)
        return
    record = {**asdict(result), "path": result.path.name, "dpl": dpl.__version__, "source": model.fingerprint}
    write_folder(path, {result.path.name: data, _RECORD: json.dumps(record, indent=2).encode()})


def _write_state_dict(network: nn.Module, draft: Path, _example: Tensor) -> "Run":
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in network.state_dict().items()}
    draft.write_bytes(serialise_tensors(tensors))
    network.load_state_dict(parse_tensors(draft.read_bytes()))
    return lambda images: logits_of(network(images))


def _write_program(network: nn.Module, draft: Path, example: Tensor) -> "Run":
    program = torch.export.export(_Logits(network), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, draft)
    module = torch.export.load(draft).module()
    return lambda images: module(images)


def _write_onnx(network: nn.Module, draft: Path, example: Tensor) -> "Run":
    for name in ("onnx", "onnxscript"):
        optional(name, "onnx")
    runtime = optional("onnxruntime", "onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about its internals
        torch.onnx.export(
            _Logits(network), (example,), draft, dynamo=True, verbose=False, external_data=False,
            input_names=["images"], output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    session = runtime.InferenceSession(draft.read_bytes(), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.cpu().numpy()})[0])


class _Logits(nn.Module):
    """A network whose output is the logits alone (Hugging Face models return more)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.network(images))


Run = Callable[[Tensor], Tensor]
_WRITERS: dict[str, Callable[[nn.Module, Path, Tensor], Run]] = {
    "state_dict": _write_state_dict,
    "onnx": _write_onnx,
    "torch_export": _write_program,
}
