"""The adaptive model: predicts, adapts, resets, saves; one object for every method."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpl.core.errors import SettingError
from dpl.core.settings import given_settings, make_settings
from dpl.core.state import Stateful, move_module, part_of
from dpl.estimate import Estimate, EstimateSettings, Watch
from dpl.guard import Guard, GuardSettings
from dpl.methods.base import Fact, Method
from dpl.methods.model_state import ModelState
from dpl.methods.registry import get_method
from dpl.model.export import Exported, ExportFormat, export
from dpl.model.inputs import Labelled, as_batches, checked_images, with_advice
from dpl.model.last import Last
from dpl.network import Network
from dpl.network.layout import LAYOUTS, channels_last, choose_layout
from dpl.snapshot import write_snapshot
from dpl.views import check_images

__all__ = ["DEFAULT_METHOD", "NOT_STORABLE", "AdaptiveModel", "adapt"]

DEFAULT_METHOD = "dpl_soft"
NOT_STORABLE = "<function>"  # stands for a setting that a file cannot hold


def adapt(
    model: nn.Module,
    method: str | None = None,
    *,
    classifier: str | None = None,
    source: Labelled = None,
    calibrate: Labelled = None,
    estimate: bool | Mapping[str, Any] | None = None,
    guard: bool | GuardSettings | Mapping[str, Any] | None = None,
    layout: str = "auto",
    on_step: Callable[[Last], None] | None = None,
    **settings: Any,
) -> AdaptiveModel:
    """Wrap a classifier so that it adapts to the images it predicts; call the result with a batch of images.

    Args:
        model: any module that returns logits [B, C]. It is copied, never changed.
        method: a name from `list_methods()`, or `X+dpl`. Without a name: soft DPL under the guard, without settings.
        classifier: name of the linear classifier inside `model`; found when not given.
        source: labelled source batches for methods that need them: a loader of (images, labels), or one such pair.
        calibrate: labelled source validation data, for the estimate of accuracy. 500 to 1,000 images suffice.
        estimate: True to watch the stream for `model.estimate()`, or settings of it; on where `calibrate=` is given.
        guard: True to compare adaptation with the source model and to stop it where it does harm, or the guard's
            settings (docs/reliability.md). A named method has none by default: it runs as its paper has it.
        layout: memory layout of the convolutions. "auto" follows a fixed rule, "timed" measures both on the first
            batch, "channels_last" and "as_is" set it. Values change by rounding only.
        on_step: called with `model.last` after every batch; for loggers.
        settings: the method's settings; `dpl list METHOD` shows them.
    """
    return AdaptiveModel(
        model,
        DEFAULT_METHOD if method is None else method,
        settings,
        classifier=classifier,
        source=source,
        calibrate=calibrate,
        estimate=estimate,
        guard=method is None if guard is None else guard,
        layout=layout,
        on_step=on_step,
    )


class AdaptiveModel(nn.Module):
    """A classifier that adapts while it predicts. Made by `dpl.adapt`.

    Attributes:
        model: the adapted network, with the `state_dict` keys of the caller's.
        method: the method object; `method.info` describes it.
        settings: the method's settings, checked.
        guard: the guard, or None.
        watch: what `estimate` asks, or None.
        state: everything that adaptation changes, for code that copies or compares states.
        layout: the memory layout in use.
    """

    model: nn.Module

    @torch.inference_mode(False)  # here and below: a tensor made in inference mode could never train again
    def __init__(
        self,
        model: nn.Module,
        method: str,
        settings: Mapping[str, Any],
        *,
        classifier: str | None = None,
        source: Labelled = None,
        calibrate: Labelled = None,
        estimate: bool | Mapping[str, Any] | None = None,
        guard: bool | GuardSettings | Mapping[str, Any] | None = None,
        layout: str = "auto",
        on_step: Callable[[Last], None] | None = None,
        prepare: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise SettingError(f"model is {type(model).__name__}: expected a torch.nn.Module that returns logits")
        if layout not in LAYOUTS:
            raise SettingError(f"layout={layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
        kind, guarded = get_method(method), given_settings(GuardSettings, "guard", guard)
        wanted = calibrate is not None if estimate is None else estimate
        watched = given_settings(EstimateSettings, "estimate", wanted)
        if guarded is not None and watched is None:
            watched = EstimateSettings(share=guarded.share)
        self.watch = None if watched is None else Watch(watched, model)
        self.guard = None if guarded is None or self.watch is None else Guard(guarded, self.watch)
        self._beside = Stateful()  # what has a state beside the model's own, by its name in `state_dict`
        for name, part in (("guard", self.guard), ("estimate", self.watch)):
            if part is not None:
                self._beside.declare_part(name, part)
        self.settings = make_settings(kind.settings_class, repr(method), settings)
        self._kind = kind.for_settings(self.settings)
        self.network = Network(model, classifier=classifier, needs_classifier=kind.info.needs_classifier)
        self.model, self.fingerprint = self.network.module, self.network.fingerprint()
        self.layout, self.on_step = layout, on_step
        self.source_batches, self.calibration = as_batches(source), as_batches(calibrate)
        self._lock = threading.RLock()
        self._shapes: set[torch.Size] = set()  # of images that the network accepted
        self.last_images: Tensor | None = None
        self.input_shape: tuple[int, ...] | None = None
        if self.source_batches is not None and not self.network.confirmed:
            for images, _ in islice(self.source_batches, 1):  # they show the classifier before the method is built
                self.network.confirm(images.to(self.network.device))
        self._build(prepare=prepare)
        if self.watch is not None and self.calibration is not None:
            self.watch.calibrate(self.calibration, self.state, measure=prepare)
        if self.layout == "channels_last":
            self._apply(channels_last)

    def _build(self, *, prepare: bool) -> None:
        """Make the method on the untouched copy and remember the state to which `reset` returns."""
        self.method: Method[Any] = self._kind(self.network, self.settings)
        self.method.attach(self.source_batches)
        self.state = ModelState(self.network, self.method)
        before = self.state.origin
        if prepare:
            self.method.prepare(self.source_batches)
            self.state.origin = self.state.copy()
        # What preparation computed: with it in a snapshot, the reset of a loaded model is exact.
        origin = self.state.origin.items()
        self.prepared = {key for key, value in origin if key not in before or not value.equal(before[key])}
        self._facts: Mapping[str, Fact] = {"updated": False, "reason": "no batch yet"}

    @torch.inference_mode(False)
    def forward(self, images: Tensor) -> Tensor:
        """Predict a batch, then adapt to it; return the logits [B, C]. If it raises, nothing has changed."""
        guard, watch = self.guard, self.watch
        with self._lock:
            images = checked_images(images, self.network, finite=guard is None, in_range=self.method.makes_views)
            if guard is None and images.shape[1:] not in self._shapes:
                self._confirm(images)
            watched = watch is not None or self.on_step is not None
            before, undo_beside = (self._facts, self.last_images), self._beside.remember() if watched else None
            try:
                self.state.begin(may_fail_later=watched)
                self.last_images = images
                logits = self.method(images) if guard is None else guard.step(images, self._confirm)
                self._facts = self.method.facts if guard is None else self.method.facts | guard.report
                if guard is None and watch is not None and watch.is_due(self.state, images):
                    watch.look(self.state, images, logits)
                if self.on_step is not None:
                    self.on_step(self.last)
            except BaseException as error:
                self.state.undo()
                if undo_beside is not None:
                    undo_beside()
                self._facts, self.last_images = before
                raise with_advice(error, images) from error.__cause__
            self.state.kept = None
            return logits

    @torch.inference_mode(False)
    def predict(self, images: Tensor) -> Tensor:
        """Predict a batch and change nothing."""
        with self._lock:
            images = checked_images(images, self.network, finite=self.guard is None, in_range=self.method.makes_views)
            if self.guard is not None:
                return self.guard.predict(images, self._confirm)
            self._confirm(images)
            return self.method.predict(images).detach()

    @property
    def last(self) -> Last:
        """What the last step did: loss, share of confident samples, classes present, updated or why not."""
        watched = {} if self.watch is None else {"estimate": lambda: self.estimate().as_dict()}
        return Last({**self._facts, **watched})

    def estimate(self) -> Estimate:
        """Estimate accuracy without labels, and whether the source model would be better (docs/reliability.md)."""
        with self._lock:
            return Estimate() if self.watch is None else self.watch.estimate()

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that train."""
        return list(self.method.trainable)

    @property
    def device(self) -> torch.device:
        """Where the model is; images must be there too."""
        return self.network.device

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Return to the source model exactly: weights, optimizer, memory, random generator, guard."""
        with self._lock:
            self.state.restore(self.state.origin)
            for part in (self.guard, self.watch):
                if part is not None:
                    part.reset()
            self._facts = {"updated": False, "reason": "reset"}

    @torch.inference_mode(False)
    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return a copy of everything that adaptation changes, as flat tensors."""
        with self._lock:
            return self.state.copy() | self._beside.state()

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> Any:
        """Set everything to a copy of `state_dict`; one that does not fit is refused and changes nothing."""
        with self._lock:
            beside = {key: value for key, value in state_dict.items() if key.split(".")[0] in vars(self._beside)}
            own = {key: value for key, value in state_dict.items() if key not in beside}
            self.state.check(own)
            self._beside.check(beside)
            if good := part_of(beside, "guard.good"):  # a freeze puts it back
                self.state.check(own | good)
            self._beside.restore(beside)
            self.state.restore(own)

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
        """Write a durable snapshot; `dpl.load(folder, model)` restores it. `notes` (plain data) are stored with it."""
        with self._lock:
            tensors = {f"state.{key}": value for key, value in self.state_dict().items()}
            tensors |= {f"origin.{key}": self.state.origin[key] for key in self.prepared}
            shape = self.input_shape if self.last_images is None else self.last_images.shape[1:]
            manifest = {**self.identity(), "input": shape, "notes": dict(notes or {})}
        return write_snapshot(Path(folder), manifest, tensors)

    def identity(self) -> dict[str, Any]:
        """Return what a state of this model depends on, as a file can hold it; `dpl.load` needs it all."""
        return {
            "source": self.fingerprint,
            "method": self.method.info.name,
            "settings": {k: NOT_STORABLE if callable(value) else value for k, value in vars(self.settings).items()},
            "guard": None if self.guard is None else vars(self.guard.settings),
            "estimate": None if self.watch is None else vars(self.watch.settings),
            "classifier": self.network.classifier_name,
            "layout": self.layout,
        }

    def export(
        self, path: str | Path, format: ExportFormat = "state_dict", *, images: Tensor | None = None
    ) -> Exported:
        """Write the adapted network as a plain one that needs no `dpl`, with the statistics in use folded in.

        `path` is a folder, or a file with the format's ending (.safetensors, .onnx, .pt2). What was written is compared
        with the adapted model on `images` (default: the last batch); the result is its path and their agreement.
        """
        with self._lock:
            return export(self, Path(path), format, images)

    def train(self, mode: bool = True) -> AdaptiveModel:
        """Do nothing: the method decides which layers behave as in training."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptiveModel:
        """Copy between two batches, never within one; the copy gets its own lock, and no images."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        with self._lock:
            own = {name: value for name, value in vars(self).items() if name not in ("_lock", "last_images")}
            vars(twin).update(deepcopy(own, memo), _lock=threading.RLock(), last_images=None)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a pickle runs code when it is loaded."""
        raise TypeError(
            "an adaptive model cannot be pickled. Within a process copy it with copy.deepcopy(model); for another one "
            "write model.save(folder) and read dpl.load(folder, source_model)"
        )

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdaptiveModel:
        with self._lock:
            move_module(self.model, fn)
            self.state.move(fn)
            self._beside.move(fn)
        return self

    def _confirm(self, images: Tensor) -> ModelState:
        """Run an image of a new shape before anything can change; start over if another layer makes the logits."""
        if images.shape[1:] in self._shapes:
            return self.state
        as_assumed = self.network.confirm(images)
        if self.method.makes_views:
            check_images(images)
        self._shapes.add(images.shape[1:])
        within_step = self.state.kept is not None
        if not as_assumed:
            self._build(prepare=True)
        if self.layout in ("auto", "timed"):
            self.layout = choose_layout(self.layout, self.network, images)
            if self.layout == "channels_last":
                self._apply(channels_last)
        if within_step and not as_assumed:
            self.state.begin(may_fail_later=True)
        return self.state
