"""The adaptive model: predicts, adapts, resets, saves; one object for every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpl.auto import Auto
from dpl.core.errors import DplError, InputError, SettingError, SnapshotError
from dpl.core.settings import make_settings
from dpl.guard import Guard, GuardSettings, guard_settings
from dpl.guard.state_copy import Ward
from dpl.methods.base import Method, Source
from dpl.methods.registry import get_method
from dpl.model.last import Last
from dpl.model.state import NOT_STORABLE, Lock, as_batches, fingerprint_of, is_fixed, part_of, storable
from dpl.network import Network
from dpl.network.layout import channels_last, check_layout, fastest_layout
from dpl.network.norm import Batch, Running
from dpl.snapshot import SnapshotStore, read_snapshot, write_snapshot

__all__ = ["AdaptiveModel", "Last", "adapt", "load"]

DEFAULT_METHOD = "auto"


def adapt(
    model: nn.Module,
    method: str = DEFAULT_METHOD,
    *,
    classifier: str | None = None,
    source: Source | tuple[Tensor, Tensor] | None = None,
    calibrate: Source | tuple[Tensor, Tensor] | None = None,
    guard: bool | GuardSettings | Mapping[str, Any] = False,
    layout: str = "auto",
    **settings: Any,
) -> AdaptiveModel:
    """Wrap a classifier so that it adapts to the images it predicts.

    Args:
        model: any module that returns logits [B, C]. It is copied, never changed.
        method: a name from `list_methods()`, or `X+dpl`; by default method and settings are chosen from the stream.
        classifier: name of the linear classifier inside `model`; found when not given.
        source: labelled source batches for methods that need them: a loader of (images, labels), or one such pair.
        calibrate: source validation data in the same form, from which the automatic choice learns how sure the model
            is where it is at home.
        guard: True to watch adaptation and end it where it does harm (docs/reliability.md), or the guard's settings.
        layout: memory layout of the convolutions: "auto" times channels-last against the model's own on the first
            batch and takes the faster, "channels_last" and "as_is" do not ask. Values change by rounding only.
        settings: the method's settings; `dpl list METHOD` shows them.

    Returns:
        The adaptive model: call it with a batch of images to predict and adapt.
    """
    if calibrate is not None and method != Auto.info.name:
        raise SettingError(f"calibrate= is for the automatic choice (no method named); {method!r} takes source=")
    return AdaptiveModel(
        model,
        method,
        classifier=classifier,
        source=source if calibrate is None else calibrate,
        settings=settings,
        guard=guard,
        layout=layout,
    )


def load(
    folder: str | Path | SnapshotStore, model: nn.Module, *, source: Source | None = None, **settings: Any
) -> AdaptiveModel:
    """Bring an adaptive model back from `AdaptiveModel.save`, or the newest good one of a `SnapshotStore`.

    `model` is the source network that was wrapped then; other weights are refused. `settings` are only needed for
    values that a file cannot hold (a callable optimizer).
    """
    if isinstance(folder, SnapshotStore):
        folder, manifest, tensors = folder.read()
    else:
        manifest, tensors = read_snapshot(Path(folder))
    stored = {name: value for name, value in manifest["settings"].items() if value != NOT_STORABLE}
    missing = set(manifest["settings"]) - set(stored) - set(settings)
    if missing:
        raise SnapshotError(f"{folder}: settings {sorted(missing)} were functions; pass them again to dpl.load")
    adaptive = AdaptiveModel(
        model,
        manifest["method"],
        classifier=manifest["classifier"],
        source=source,
        settings=stored | settings,
        guard=manifest.get("guard"),
        layout=manifest.get("layout", "as_is"),
        prepared=True,
    )
    if manifest["source"] != adaptive.fingerprint:
        raise SnapshotError(f"{folder} was saved from other source weights than those of the given model")
    origin = {key[len("origin.") :]: value for key, value in tensors.items() if key.startswith("origin.")}
    current = {key[len("state.") :]: value for key, value in tensors.items() if key.startswith("state.")}
    adaptive.load_state_dict(adaptive._origin | origin)
    adaptive._origin = adaptive.state_dict()
    adaptive._prepared = set(origin)
    adaptive.load_state_dict(current)
    return adaptive


class AdaptiveModel(nn.Module):
    """A classifier that adapts while it predicts. Made by `dpl.adapt`."""

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        method: str,
        *,
        classifier: str | None = None,
        source: Source | tuple[Tensor, Tensor] | None = None,
        settings: Mapping[str, Any],
        guard: bool | GuardSettings | Mapping[str, Any] | None = None,
        layout: str = "auto",
        prepared: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise SettingError(f"model is {type(model).__name__}: expected a torch.nn.Module that returns logits")
        kind = get_method(method)
        guarded = guard_settings(guard)
        self.guard = None if guarded is None else Guard(guarded, model)
        self.settings = make_settings(kind.settings_class, repr(method), settings)
        self._kind = kind
        self._network = Network(model, classifier=classifier, needs_classifier=kind.info.needs_classifier)
        self.model = self._network.module
        self.fingerprint = fingerprint_of(self.model)
        self._source = as_batches(source)
        self._lock = Lock()
        self._accepted: set[torch.Size] = set()
        if self._source is not None and not self._network.confirmed:
            for images, _ in self._source:
                self._network.watch(images.to(self._network.device))
                break
        self.layout = check_layout(layout)
        self._build(prepare=not prepared)
        if self.layout == "channels_last":
            self._apply(channels_last)

    def _build(self, *, prepare: bool) -> None:
        """Make the method on the untouched copy and remember the state to which `reset` returns."""
        self.method: Method[Any] = self._kind(self._network, self.settings)
        self.method.attach(self._source)
        before = None if self._source is None and self._kind.info.source == "never" else self.state_dict()
        if prepare:
            self.method.prepare(self._source)
        self._origin = self.state_dict()
        self._prepared: set[str] = set()  # what a snapshot must hold for reset to be exact
        if before is not None:
            self._prepared = {k for k, v in self._origin.items() if k not in before or not torch.equal(v, before[k])}
        self._last = Last({"updated": False, "reason": "no batch yet"})

    def forward(self, images: Tensor) -> Tensor:
        """Predict a batch, then adapt to it; return the logits [B, C]."""
        with self._lock:
            self._check(images)
            if self.guard is None:
                logits = self._act(images)
                self._last = Last(self.method.facts)
            else:
                logits = self.guard.step(images, self._reins)
                self._last = Last(self.method.facts | self.guard.report)
            return logits

    def _act(self, images: Tensor) -> Tensor:
        if len(images) < self.method.info.min_batch:
            reason = f"a batch of {len(images)} is below the method's minimum of {self.method.info.min_batch}"
            self.method.facts = {"updated": False, "reason": reason}
            return self.method.predict(images).detach()
        if not self.method.due():
            self.method.facts = {"updated": False, "reason": "only some batches are learnt from (setting 'interval')"}
            return self.method.predict(images).detach()
        return self.method.act(images).detach()

    def _reins(self, images: Tensor) -> Ward:
        """Hand the model over to the guard, once the network has accepted such images."""
        self._check_shape(images)
        return Ward(self._network, self.method, self._origin, self._act, self._restore)

    def predict(self, images: Tensor) -> Tensor:
        """Predict a batch and change nothing."""
        with self._lock:
            self._check(images)
            if self.guard is not None:
                return self.guard.predict(images, self._reins)
            return self.method.predict(images).detach()

    @property
    def last(self) -> Last:
        """What the last step did: loss, share of confident samples, classes present, updated or why not."""
        return self._last

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that train."""
        return list(self.method.trainable)

    def reset(self) -> None:
        """Return to the source model, bit for bit: weights, optimizer, memory, random generator."""
        self.load_state_dict(self._origin)
        self._last = Last({"updated": False, "reason": "reset"})

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return a copy of everything that adaptation changes, as flat tensors."""
        state = {f"model.{key}": value.detach().clone() for key, value in self.model.state_dict().items()}
        state |= {f"method.{key}": value for key, value in self.method.state().items()}
        for name, optimizer in self.method.optimizers.items():
            state |= {f"{name}.{key}": value for key, value in optimizer.state().items()}
        if self.guard is not None:
            state |= {f"guard.{key}": value for key, value in self.guard.state().items()}
        return state | {"generator": self.method.random.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> Any:
        """Set everything to a copy of `state_dict`; one that does not fit is refused and changes nothing."""
        self._check_state(state_dict)
        with self._lock:
            self._restore(state_dict)
            if self.guard is not None:
                self.guard.restore(part_of(state_dict, "guard"))

    def _restore(self, state: Mapping[str, Tensor]) -> None:
        """Set everything but the guard to a copy of `state`."""
        self.model.load_state_dict(part_of(state, "model"))
        self.method.restore(self._on_device(part_of(state, "method")))
        for name, optimizer in self.method.optimizers.items():
            optimizer.restore(part_of(state, name))
        self.method.random.generator.set_state(state["generator"].cpu())

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
        """Write a durable snapshot; `dpl.load(folder, model)` brings it back. `notes` (plain data) ride along."""
        manifest = {
            "method": self.method.info.name,
            "settings": self.stored_settings(),
            "classifier": self._network.classifier_name,
            "source": self.fingerprint,
            "layout": self.layout,
            "guard": None if self.guard is None else vars(self.guard.settings),
            "notes": dict(notes or {}),
        }
        tensors = {f"state.{key}": value for key, value in self.state_dict().items()}
        tensors |= {f"origin.{key}": value for key, value in self._origin.items() if key in self._prepared}
        return write_snapshot(Path(folder), manifest, tensors)

    def stored_settings(self) -> dict[str, Any]:
        """Return the settings as a file can hold them."""
        return {name: storable(value) for name, value in vars(self.settings).items()}

    def train(self, mode: bool = True) -> AdaptiveModel:
        """Do nothing: the method decides which layers behave as in training."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdaptiveModel:
        super()._apply(fn)  # type: ignore[no-untyped-call]
        states = {name: optimizer.state() for name, optimizer in self.method.optimizers.items()}
        self.method.move(fn)
        for name, optimizer in self.method.optimizers.items():
            optimizer.restore({k: v if k.endswith("/step") else fn(v) for k, v in states[name].items()})
        self._origin = {k: v if is_fixed(k) else fn(v) for k, v in self._origin.items()}
        self.method.random.follow(self._network.device)
        if self.guard is not None:
            self.guard.move(fn)
        return self

    def _check(self, images: Tensor) -> None:
        """Refuse a batch that cannot be predicted, before anything has changed."""
        if not isinstance(images, Tensor):
            raise InputError(f"images is {type(images).__name__}: expected a torch.Tensor [batch, channels, ...]")
        if images.ndim < 2 or len(images) == 0:
            raise InputError(f"images has shape {tuple(images.shape)}: expected a non-empty batch [batch, ...]")
        if not images.is_floating_point():
            raise InputError(f"images has dtype {images.dtype}: expected floating point; use images.float() / 255")
        if images.device != self._network.device:
            raise InputError(f"images is on {images.device}, the model on {self._network.device}; move one of them")
        wanted = self._network.dtype
        if images.dtype != wanted and not torch.is_autocast_enabled(images.device.type):
            raise InputError(f"images has dtype {images.dtype}, the model {wanted}; use images.to({wanted})")
        if self.guard is not None:
            return  # it sets rows that are not finite aside, and looks at the shape of the others
        if not torch.isfinite(images).all():
            bad = [i for i, row in enumerate(images) if not torch.isfinite(row).all()]
            raise InputError(f"images has non-finite values in rows {bad[:8]}; drop those rows and call again")
        self._check_shape(images)

    def _check_shape(self, images: Tensor) -> None:
        if images.shape[1:] not in self._accepted:
            self._try(images)

    def _try(self, images: Tensor) -> None:
        """Show the network one image of a new shape, before anything can change.

        The first one also tells which layer really makes the logits; if it is not the assumed one, start over.
        """
        try:
            as_assumed = self._network.watch(images)
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError) as error:
            if isinstance(error, DplError):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"the network refused images of shape {tuple(images.shape)}: {reason}") from error
        self._accepted.add(images.shape[1:])
        if not as_assumed:
            self._build(prepare=True)
        if self.layout == "auto":
            self._choose_layout(images)

    def _choose_layout(self, images: Tensor) -> None:
        norm = self._network.norm
        rule = Running() if isinstance(norm.rule, Running) else Batch()  # statistics have a favourite layout too
        with norm.using(rule):
            self.layout = fastest_layout(self.model, self._network.differentiate, images, rule)
        if self.layout == "channels_last":
            self._apply(channels_last)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        names = ["model", "method", *self.method.optimizers] + ["guard"] * (self.guard is not None)
        parts = {name: part_of(state, name) for name in names}
        known = {"generator"}.union(*({f"{name}.{key}" for key in part} for name, part in parts.items()))
        unknown = set(state) - known
        if unknown or "generator" not in state:
            raise SnapshotError(f"not a state of this adaptive model: {sorted(unknown)[:4] or 'no generator'}")
        own = {key: value.shape for key, value in self.model.state_dict().items()}
        if own != {key: value.shape for key, value in parts["model"].items()}:
            raise SnapshotError("the state's model has other parameters or shapes than this one")
        self.method.check(parts["method"])
        for name, optimizer in self.method.optimizers.items():
            optimizer.check(parts[name])
        if self.guard is not None:
            self.guard.check(parts["guard"])

    def _on_device(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.to(self._network.device) for key, value in state.items()}
