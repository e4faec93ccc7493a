"""Everything done to somebody else's network: on a private copy, reversible, keys unchanged."""

from dpl.network.network import Network, Pass

__all__ = ["Network", "Pass"]
