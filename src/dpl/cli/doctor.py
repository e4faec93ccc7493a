"""`dpl doctor`: is the environment, the model and its images as adaptation needs them; why figures differ."""

import argparse
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpl.backbones.normalise import PRESETS, Normalized
from dpl.bench.causes import causes_of_difference
from dpl.cli.console import print_json, print_table
from dpl.cli.models import add_model_arguments, count, load_source, parse_settings, read_images
from dpl.core.allocator import keep_freed_memory
from dpl.core.errors import ModelError, SettingError
from dpl.core.settings import make_settings
from dpl.methods import get_method
from dpl.methods.base import Method
from dpl.methods.dpl import PrototypeMethod
from dpl.methods.parts.norm_rules import batch_share, parse_norm
from dpl.methods.settings import Settings
from dpl.network.layout import SMALL_SIDE
from dpl.network.split import (
    NORMS,
    SCOPES,
    find_classifier,
    logits_of,
    private_copy,
    select_parameters,
    watch_classifier,
)
from dpl.runs.costs import environment

_IMAGES = 16  # enough for a range and a mean, and read in a moment
_USUAL_BATCH = 32  # images: the batch size of the paper's Table 1, also with batch statistics
# The largest value that one normalisation makes of images in [0, 1]; a tenth more, for statistics of other data sets.
_LARGEST = 1.1 * max(max(m, 1 - m) / s for mean, std in PRESETS.values() for m, s in zip(mean, std, strict=True))


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: what was found, and what to do about it: a problem makes results wrong, a warning may."""

    name: str
    found: str
    problem: str = ""
    warning: str = ""

    @property
    def status(self) -> str:
        """The result in a word."""
        return "problem" if self.problem else "warning" if self.warning else "ok"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_arguments(parser, required=False)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help=f"look at {_IMAGES} of these, not at noise")
    parser.add_argument("--batch-size", type=count, default=32, help="images per batch (default: %(default)s)")
    parser.add_argument("--paper", metavar="FILE", help="experiment file, or a shipped one such as table1: "
                        "show what can make your figures differ from it")  # fmt: skip
    parser.add_argument("--row", metavar="METHOD", help="row of --paper")


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 1 if there is a problem."""
    if args.images is not None and args.model is None:
        raise SettingError("--images: the images are checked with a model; give --model too")
    if (args.paper is None) != (args.row is None):
        raise SettingError("--paper and --row belong together, e.g. --paper table1 --row tent")
    environment = describe_environment(keep_freed_memory())
    checks = [] if args.model is None else _checks(args)
    causes = {} if args.paper is None else causes_of_difference(args.paper, args.row)
    if args.json:
        records = [{**dataclasses.asdict(check), "status": check.status} for check in checks]
        print_json({"environment": environment, "checks": records, "causes": causes})
    else:
        _print(environment, checks, causes)
    return int(any(check.problem for check in checks))


def _checks(args: argparse.Namespace) -> list[Check]:
    """Examine the model with some images of the folder, or with noise in [0, 1]."""
    source = load_source(args)
    kind = get_method(args.method)
    settings = make_settings(kind.settings_class, repr(args.method), parse_settings(args.set))
    images = torch.rand(_IMAGES, 3, source.size, source.size, generator=torch.Generator().manual_seed(0))
    if read := read_images("--images", args.images, source.transform, _IMAGES):
        images = torch.cat([batch for batch, _ in read])
    device = next(source.network.parameters()).device
    return examine(source.network, images.to(device), kind, settings, args.batch_size)


def _print(environment: dict[str, Any], checks: list[Check], causes: dict[str, str]) -> None:
    print_table(["environment", "found"], [[name, str(value)] for name, value in environment.items()])
    if checks:
        print()
        print_table(["check", "result", "found"], [[check.name, check.status, check.found] for check in checks])
    for check in checks:
        if advice := check.problem or check.warning:
            print(f"{check.name}: {advice}")
    if causes:
        print("\nIf your figures differ from this row, compare these nine with your run:")
        print_table(["cause", "this row has"], list(causes.items()))


def describe_environment(keeps_memory: bool) -> dict[str, str | int]:
    """Return versions, devices, threads, the allocator and the layout rule."""
    gpus = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return environment() | {
        "devices": ", ".join(["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]),
        "allocator": f"freed memory is {'kept' if keeps_memory else 'returned to the system'}",
        "layout": f"auto: channels_last for spatial convolutions on images from {SMALL_SIDE} pixels on, else as_is",
    }


def examine(
    network: nn.Module, images: Tensor, kind: type[Method[Any]], settings: Settings, batch_size: int
) -> list[Check]:
    """Return all checks of a network on a few images, or on noise, for a method and its settings."""
    network = private_copy(network).eval()
    try:
        checks = [*_one_pass(network, images), _classifier(network, images, kind.info.needs_classifier)]
    except (RuntimeError, ValueError, AssertionError) as error:  # raised by the user's network
        advice = "The network refused the images: check --size, the channels and the weights."
        checks = [Check("forward pass", str(error).partition("\n")[0], advice)]
    norms = [layer for layer in network.modules() if isinstance(layer, NORMS)]
    checks += [_norm_layers(norms, kind.info.needs_norm), _statistics(norms)]
    return [*checks, _scopes(network, settings), _batch_size(kind, settings, batch_size)]


def _one_pass(network: nn.Module, images: Tensor) -> list[Check]:
    """Check the logits, and whether what reaches the first convolution or linear layer is normalised once."""
    seen: list[Tensor] = []
    for layer in network.modules():  # of our copy, which keeps the hooks
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            layer.register_forward_pre_hook(lambda _, inputs: None if seen else seen.append(inputs[0].detach()))
    with torch.no_grad():
        logits = logits_of(network(images))
    bad = int((~logits.isfinite()).any(dim=1).sum())
    advice = "Look for NaN in weights and statistics, and for a type too small for the values." if bad else ""
    inside = any(isinstance(layer, Normalized) for layer in network.modules())
    found = f"finite for {len(logits) - bad} of {len(logits)} images, {logits.shape[1]} classes"
    return [Check("logits", found, advice), _normalisation((seen or [images])[0], images, inside)]


def _normalisation(values: Tensor, images: Tensor, inside: bool) -> Check:
    low, high, problem, warning = float(values.min()), float(values.max()), "", ""
    if images.min() >= 0 and images.max() > _LARGEST:
        problem = "The images look like bytes: divide them by 255."
    elif (inside and images.min() < 0) or max(-low, high) > _LARGEST:
        problem = "The images look normalised twice: pass them in [0, 1] and normalise in one place."
    elif low >= 0 and high <= 1:
        warning = "The images are not normalised: do so inside the network, unless it was trained without."
    layer = "with" if inside else "without"
    found = f"{low:.2f} to {high:.2f}, mean {float(values.mean()):.2f} at the first layer; {layer} Normalized layer"
    return Check("normalisation", found, problem, warning)


def _classifier(network: nn.Module, images: Tensor, needed: bool) -> Check:
    try:
        name = watch_classifier(network, images, find_classifier(network))
    except ModelError as error:
        advice = "Choose a method that needs no linear classifier: see dpl list."
        return Check("classifier", str(error), advice if needed else "", advice)
    layer = network.get_submodule(name)
    return Check("classifier", f"{name}: {layer.in_features} features, {layer.out_features} classes")


def _norm_layers(layers: Sequence[nn.Module], needed: bool) -> Check:
    kinds = Counter(type(layer).__name__ for layer in layers)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    lacking = needed and not any(isinstance(layer, _BatchNorm) for layer in layers)
    problem = "The method needs BatchNorm: choose another (dpl list)." if lacking else ""
    return Check("norm layers", found, problem, "" if layers else "Do not use scope='affine': nothing would train.")


def _statistics(norms: Sequence[nn.Module]) -> Check:
    layers = [layer for layer in norms if isinstance(layer, _BatchNorm)]
    kept = [(x.running_mean, x.running_var) for x in layers if x.running_mean is not None and x.running_var is not None]
    broken = sum(not ((mean + var).isfinite().all() and (var > 0).all()) for mean, var in kept)
    unused = sum(not mean.any() and bool((var == 1).all()) for mean, var in kept)
    found = f"{len(kept)} layers: {broken} not finite or without positive variance, {unused} still at 0 and 1"
    problem = "Load the source weights again: the file may be damaged." if broken else ""
    warning = "Load trained weights with their buffers, or use norm='batch'." if unused else ""
    return Check("BatchNorm statistics", found, problem, warning)


def _scopes(network: nn.Module, settings: Settings) -> Check:
    counts = dict.fromkeys(SCOPES, 0)
    for scope in SCOPES:
        with contextlib.suppress(ModelError):  # nothing trains in this scope
            chosen = select_parameters(network, scope, None, getattr(settings, "train_from", None))
            counts[scope] = sum(parameter.numel() for parameter in chosen.values())
    own = getattr(settings, "scope", "all")
    problem = "" if counts[own] else f"scope={own!r} trains nothing here: choose another scope."
    return Check("parameters that train", ", ".join(f"{scope} {n:,}" for scope, n in counts.items()), problem)


def _batch_size(kind: type[Method[Any]], settings: Settings, batch_size: int) -> Check:
    least = max(kind.info.min_batch, 2 if issubclass(kind, PrototypeMethod) else 1)  # DPL compares classes of a batch
    problem = f"The method needs {least} images in a batch to learn: send larger batches." if batch_size < least else ""
    share = batch_share(parse_norm(settings.norm, settings.norm_prior, settings.norm_shift), batch_size) or 0.0
    advice = f"Statistics of few images are noisy: send {_USUAL_BATCH} or more, or set norm='running'."
    warning = advice if batch_size < _USUAL_BATCH and share > 0.5 else ""
    return Check("batch size", f"{batch_size}, {kind.info.name} with norm={settings.norm!r}", problem, warning)
