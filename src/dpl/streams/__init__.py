"""The order in which test data arrive, for any data set: only names, labels and sample numbers are used.

`plan` turns domains into segments by one of the named `PROTOCOLS`; `batches` cuts a segment for the model:

>>> night = Domain("night", labels=[0, 1, 1, 0, 2])
>>> [segment] = plan("reset_each_shift", [night], seed=1)
>>> [len(batch) for batch in batches(segment, batch_size=2)]
[2, 2, 1]

docs/protocols.md defines every protocol. Nothing here reads images or knows a model.
"""

from dpl.streams.domain import Domain, IntArray, Segment, batches
from dpl.streams.domainbed import Split, domainbed_split, seed_hash
from dpl.streams.protocol import PROTOCOLS, Protocol, plan

__all__ = [
    "PROTOCOLS",
    "Domain",
    "IntArray",
    "Protocol",
    "Segment",
    "Split",
    "batches",
    "domainbed_split",
    "plan",
    "seed_hash",
]
