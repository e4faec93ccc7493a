"""The way back from a snapshot to an adaptive model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpl.core.errors import SnapshotError
from dpl.core.state import part_of
from dpl.model.adaptive import NOT_STORABLE, AdaptiveModel
from dpl.model.inputs import Labelled
from dpl.snapshot import SnapshotStore, read_snapshot

__all__ = ["load"]


@torch.inference_mode(False)
def load(
    folder: str | Path | SnapshotStore,
    model: nn.Module,
    *,
    source: Labelled = None,
    calibrate: Labelled = None,
    **settings: Any,
) -> AdaptiveModel:
    """Load an adaptive model from `AdaptiveModel.save`, a stream's snapshot, or the newest intact one of a store.

    `model` is the source network that was wrapped then; other weights are refused. `settings` are only needed for
    values that a file cannot hold (a callable optimizer). What `calibrate=` showed is in the snapshot; pass it again so
    that the estimate can also ask how the present weights do on those images.
    """
    if isinstance(folder, SnapshotStore):
        folder, manifest, tensors = folder.read()
    else:
        manifest, tensors = read_snapshot(Path(folder))
    if "settings" not in manifest:
        raise SnapshotError(f"{folder} does not say which method made it; only the dpl serve that wrote it can read it")
    of_server = "removed" in manifest  # `dpl serve` stores what differs from the source state
    stored = {name: value for name, value in manifest["settings"].items() if value != NOT_STORABLE}
    missing = set(manifest["settings"]) - set(stored) - set(settings)
    if missing:
        raise SnapshotError(f"{folder}: settings {sorted(missing)} were functions; pass them again to dpl.load")
    adaptive = AdaptiveModel(
        model,
        manifest["method"],
        stored | settings,
        classifier=manifest["classifier"],
        source=source,
        calibrate=calibrate,
        estimate=manifest.get("estimate") or False,
        guard=manifest.get("guard"),
        layout=manifest.get("layout", "as_is"),
        prepare=of_server,
    )
    if manifest["source"] != adaptive.fingerprint:
        raise SnapshotError(
            f"cannot load {folder}: it was saved from a model with other weights; pass the same source model"
        )
    adaptive.input_shape = manifest.get("input")
    try:
        if of_server:
            state = adaptive.state_dict() | tensors
            state = {key: value for key, value in state.items() if key not in manifest["removed"]}
        else:
            state, prepared = part_of(tensors, "state"), part_of(tensors, "origin")
            origin = adaptive.state.origin | prepared
            adaptive.state.check(origin)
            adaptive.state.restore(origin)  # on the model's device
            adaptive.state.origin, adaptive.prepared = adaptive.state.copy(), set(prepared)
        adaptive.load_state_dict(state)
    except SnapshotError as error:
        raise SnapshotError(f"cannot load {folder}, written by dpl {manifest.get('dpl')}: {error}") from error
    return adaptive
