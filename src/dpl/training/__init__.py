"""Source models by DomainBed's protocol: `train(TrainSpec(dataset="PACS", target="sketch"), data=..., out=...)`.

A run lives in one folder, can be killed at any moment and goes on where it was, to the bit. docs/training.md tells all.
"""

from dpl.training.loop import StepReport, TrainResult, train
from dpl.training.spec import TrainSpec

__all__ = ["StepReport", "TrainResult", "TrainSpec", "train"]
