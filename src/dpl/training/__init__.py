"""Source models by DomainBed's protocol: `train(TrainSpec(dataset="PACS", target="sketch"), data=..., out=...)`.

A run has one folder, can be killed at any moment and resumes exactly. Nothing here adapts a model at test time.
"""

from dpl.training.loop import TrainResult, train
from dpl.training.sources import TrainSpec

__all__ = ["TrainResult", "TrainSpec", "train"]
