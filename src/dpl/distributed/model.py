"""One adaptive model in several processes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpl.adapter import AdaptiveModel
from dpl.distributed.network import ParallelNetwork
from dpl.distributed.team import Team
from dpl.errors import InputError, ModelError
from dpl.guard import GuardSettings
from dpl.methods.base import Source
from dpl.surgery.layout import channels_last

__all__ = ["DistributedModel", "adapt"]


def adapt(
    model: nn.Module,
    method: str = "dpl",
    *,
    classifier: str | None = None,
    source: Source | tuple[Tensor, Tensor] | None = None,
    guard: bool | GuardSettings | Mapping[str, Any] = False,
    layout: str = "auto",
    **settings: Any,
) -> "DistributedModel":
    """Do as `dpl.adapt` in every process of a team; all give the same model, settings and source batches."""
    return DistributedModel(
        model, method, classifier=classifier, source=source, settings=settings, guard=guard, layout=layout
    )


class DistributedModel(AdaptiveModel):
    """Adapts to the batch that all processes hold together. Made by `dpl.distributed.adapt`.

    Every process calls it at the same time with its own images, of which there may be none, and gets their logits.
    """

    network_class = ParallelNetwork

    def __init__(self, model: nn.Module, method: str, **options: Any) -> None:
        self.__dict__["team"] = Team.current()
        super().__init__(model, method, **options)
        said = f"{method} {self.stored_settings()} {self.fingerprint}"
        digest = torch.frombuffer(bytearray(hashlib.sha256(said.encode()).digest()), dtype=torch.uint8)
        told = self.team.join(digest[None].to(self._network.device), [1] * self.team.size)
        if not bool((told == told[0]).all()):
            raise ModelError(
                "model, method or settings are not the same in all processes; load the same weights in each of them"
            )

    team: Team

    def forward(self, images: Tensor) -> Tensor:
        """Predict one's own images, then adapt to those of all processes; return the logits of one's own."""
        whole, own = self._whole(images)
        return super().forward(whole)[own]

    def predict(self, images: Tensor) -> Tensor:
        """Predict one's own images and change nothing."""
        whole, own = self._whole(images)
        return super().predict(whole)[own]

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
        """Write a durable snapshot, once; all processes return when it is there."""
        path = super().save(folder, notes) if self.team.rank == 0 else Path(folder)
        self.team.wait()
        return path

    def _choose_layout(self, images: Tensor) -> None:
        """Take the layout that is fastest for the first process: with another one the last digits would differ."""
        super()._choose_layout(images)
        own, self.layout = self.layout, self.team.hear(self.layout)
        if own != self.layout:
            self._apply(channels_last if self.layout == "channels_last" else torch.Tensor.contiguous)

    def _whole(self, images: Tensor) -> tuple[Tensor, slice]:
        """Return the images of all processes, and which of them are one's own."""
        if not isinstance(images, Tensor) or not 2 <= images.ndim <= _MOST_DIMENSIONS:
            raise InputError(f"images is {type(images).__name__}: expected a torch.Tensor [batch, channels, ...]")
        shape = [
            *images.shape,
            *[0] * (_MOST_DIMENSIONS - images.ndim),
            _TYPES.index(images.dtype) if images.dtype in _TYPES else -1,
        ]
        told = self.team.join(torch.tensor([shape], device=self._network.device), [1] * self.team.size).tolist()
        if any(row[1:] != told[0][1:] for row in told):
            raise InputError(f"images has shape {tuple(images.shape)} and dtype {images.dtype}; others have {told}")
        sizes = [row[0] for row in told]
        start = sum(sizes[: self.team.rank])
        return self.team.join(images, sizes), slice(start, start + len(images))


_MOST_DIMENSIONS = 5
_TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64]
