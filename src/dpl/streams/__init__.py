"""The order in which test data arrive, for any data set: only names, labels and sample numbers are used.

docs/protocols.md defines every protocol. Nothing here reads images or knows a model.
"""

from dpl.streams.domain import Domain, IntArray, Segment, Split, batches, domainbed_split, seed_hash
from dpl.streams.protocol import PROTOCOLS, Order, Protocol, plan

__all__ = [
    "PROTOCOLS", "Domain", "IntArray", "Order", "Protocol", "Segment", "Split", "batches", "domainbed_split", "plan",
    "seed_hash",
]  # fmt: skip
