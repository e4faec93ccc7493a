"""What a network holds inside: features after a stream, styles at the first stage; kept in the store beside runs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpl.bench import BenchContext, Unit, run_unit
from dpl.bench.images import open_parts, segment_batches
from dpl.core.errors import DataError
from dpl.network import Network
from dpl.network.style_layer import find_style_layer, prefix_tokens
from dpl.objectives import style_statistics
from dpl.streams import plan

__all__ = ["kept", "look_at_features", "look_at_styles"]

Arrays = dict[str, NDArray[Any]]


def kept(folder: Path, unit: Unit, kind: str, make: Callable[[], Arrays] | None) -> Arrays | None:
    """Return what was kept of a unit; what is not there is made and kept, or None where nothing may be run."""
    path = folder / f"{unit.key}.{kind}.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); remove it to have it made again") from error
    if make is None:
        return None
    arrays = make()
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.npz")
    np.savez_compressed(draft, **arrays)  # type: ignore[arg-type]
    os.replace(draft, path)
    return arrays


def look_at_features(unit: Unit, context: BenchContext) -> Arrays:
    """Adapt to the whole stream, then return every image's features under the network as it has become."""
    model = context.prepared(unit, open_parts(unit, context)).model
    run_unit(unit, context)  # takes the same model, which the context keeps, from its source state to the end
    found: dict[str, list[NDArray[Any]]] = {"features": [], "label": []}
    for images, labels in _batches(unit, context):
        with torch.no_grad():
            found["features"].append(model.method.network(images).z.half().numpy())
        found["label"].append(labels.numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def look_at_styles(unit: Unit, context: BenchContext) -> Arrays:
    """Return each image's style under the source network (Eq. 8 and 9), and how confident it is."""
    network = context.prepared(unit, open_parts(unit, context)).model.method.network
    layer, prefix = find_style_layer(network.module), prefix_tokens(network.module)
    found: dict[str, list[NDArray[Any]]] = {"style": [], "confidence": []}
    for images, _ in _batches(unit, context):
        style, confidence = _styles(network, images, layer, prefix)
        found["style"].append(style.numpy())
        found["confidence"].append(confidence.numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


@torch.no_grad()
def _styles(network: Network, images: Tensor, layer: str, prefix: int) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def look(maps: Tensor) -> Tensor:
        mean, deviation = style_statistics(maps[:, prefix:] if maps.ndim == 3 else maps)
        seen.append(torch.cat([mean.flatten(1), deviation.flatten(1)], dim=1))
        return maps

    out = network(images, at=layer, change=look)
    return seen[-1].float(), out.probabilities.max(dim=1).values


def _batches(unit: Unit, context: BenchContext) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the unit's images again, in order of arrival."""
    parts = open_parts(unit, context)
    domains = [part.domain for part in parts]
    for segment in plan(unit.protocol, domains, seed=unit.seed, order=unit.order, delta=unit.delta, visits=unit.visits):
        for batch in segment_batches(segment, parts, unit, context):
            if len(batch):
                yield batch.images.contiguous(memory_format=torch.channels_last), batch.labels
