"""The adapted network as a plain one: no `dpl`, no adaptation, fixed statistics.

Weights are those of the network that predicts now. Running statistics of BatchNorm layers become what adaptation
normalised with: themselves, or their blend with the average of recent batches (`TargetStatistics`). A
classifier that a method made (T3A's templates) takes the place of the network's. The file is read back and compared
with the adapted model.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpl.core.errors import InputError, ModelError, SettingError
from dpl.core.extras import optional
from dpl.core.files import write_file
from dpl.methods.base import Method
from dpl.methods.parts.norm_rules import AutoBlend, batch_share, blend
from dpl.network.norm_control import RECENT, uninstall
from dpl.network.split import logits_of, private_copy

if TYPE_CHECKING:
    from dpl.model.adaptive import AdaptiveModel

__all__ = ["ExportFormat", "Exported", "export", "plain_network", "reason_not_to_export"]

ExportFormat = Literal["state_dict", "onnx", "torch_export"]
Run = Callable[[Tensor], Tensor]  # what was written and read back


@dataclass(frozen=True)
class Exported:
    """An exported file, usable as a path, and how well it agrees with the adapted model."""

    path: Path
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
    if format not in _FORMATS:
        raise SettingError(f"format={format!r}: expected one of {', '.join(map(repr, _FORMATS))}")
    ending, write = _FORMATS[format]
    target = path if path.suffix == ending else path / f"model{ending}"
    if target != path and (path.is_file() or any(path.suffix == other for other, _ in _FORMATS.values())):
        raise SettingError(f"path {path}: expected a file that ends in {ending}, or a folder")
    network, statistics = plain_network(model.method)
    images = model.last_images if images is None else images
    shape = model.input_shape if images is None else images.shape[1:]
    if shape is None and format != "state_dict":
        raise InputError(f"format={format!r} needs the shape of an image: pass images=, or predict a batch first")
    # Two images, because a tracer takes a batch of one for a constant.
    data, run = write(network, torch.zeros(2, *(shape or ()), device=model.device, dtype=model.network.dtype))
    agreement, compared = _agreement(model, run, images)
    return Exported(write_file(target, data), statistics, agreement, compared)


def plain_network(method: Method[Any]) -> tuple[nn.Module, str]:
    """Return a plain copy of the network that predicts, and where its BatchNorm statistics come from."""
    reason = reason_not_to_export(method)
    if reason:
        raise ModelError(f"{method.info.name!r} cannot be exported: {reason}; model.save keeps the adaptive model")
    network, target = method.predicting, method.target_statistics
    rule = network.norm.rule
    share = 0.0 if target is None else batch_share(rule, target.images) or 0.0
    batches = 0 if target is None or not share else min(target.batches, RECENT)
    copy = private_copy(network.module)
    uninstall(copy)
    averages = {} if target is None or not batches else target.by_layer(network.norm)
    layers: Any = zip(network.module.modules(), copy.modules(), strict=True)
    for layer, plain in layers:
        if layer in network.norm.columns:
            used = layer.running_mean, layer.running_var
            if isinstance(rule, AutoBlend):
                used = rule.rest(layer, network.norm)
            if layer in averages:
                used = blend(used, averages[layer], share)
            plain.running_mean.copy_(used[0])
            plain.running_var.copy_(used[1])
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
    if norm.layers and batch_share(norm.rule, 1) is None:
        return f"its statistics ({type(norm.rule).__name__}) are made for each batch or image and cannot be fixed"
    return ""


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


@torch.no_grad()
def _agreement(model: "AdaptiveModel", run: Run, images: Tensor | None) -> tuple[float | None, int]:
    """Return the share of images that both predict alike, and how many; a guard excludes what is not finite."""
    finite = None if images is None else images[images.isfinite().flatten(1).all(dim=1)]
    if finite is None or len(finite) == 0:
        return None, 0
    expected = model.method.predict(finite).argmax(dim=1)
    return float((run(finite).argmax(dim=1).cpu() == expected.cpu()).float().mean()), len(finite)


def _write_state_dict(network: nn.Module, _example: Tensor) -> tuple[bytes, Run]:
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in network.state_dict().items()}
    data = serialise_tensors(tensors)
    network.load_state_dict(parse_tensors(data))
    return data, _Logits(network)


def _write_program(network: nn.Module, example: Tensor) -> tuple[bytes, Run]:
    file = io.BytesIO()
    dynamic = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(_Logits(network), (example,), dynamic_shapes=dynamic), file)
    return file.getvalue(), torch.export.load(io.BytesIO(file.getvalue())).module()


def _write_onnx(network: nn.Module, example: Tensor) -> tuple[bytes, Run]:
    for name in ("onnx", "onnxscript"):
        optional(name, "onnx")
    runtime = optional("onnxruntime", "onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about its internals
        program = torch.onnx.export(
            _Logits(network), (example,), dynamo=True, verbose=False,
            input_names=["images"], output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    data: bytes = program.model_proto.SerializeToString()  # type: ignore[union-attr]
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda images: torch.from_numpy(session.run(["logits"], {"images": images.cpu().numpy()})[0])


class _Logits(nn.Module):
    """A network whose output is the logits alone (Hugging Face models return more)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.network(images))


_FORMATS: dict[str, tuple[str, Callable[[nn.Module, Tensor], tuple[bytes, Run]]]] = {
    "state_dict": (".safetensors", _write_state_dict),
    "onnx": (".onnx", _write_onnx),
    "torch_export": (".pt2", _write_program),
}
