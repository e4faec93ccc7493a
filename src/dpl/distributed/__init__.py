"""Several processes as one: adaptation and training of one model on several devices, started by `torchrun`.

Each process gives its own part of a batch; sums, means, statistics and gradients are those of the whole batch, so that
all processes hold the model that one process would hold. docs/scale.md tells how to use it and what it costs.
"""

from dpl.distributed.model import DistributedModel, adapt
from dpl.distributed.team import Team, started

__all__ = ["DistributedModel", "Team", "adapt", "started"]
