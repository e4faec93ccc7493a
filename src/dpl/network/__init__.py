"""Everything that is done to somebody else's network: on a private copy, reversible, `state_dict` keys unchanged.

`Network` runs that copy and returns a `Pass`. No method, loss or setting lives here.
"""

from dpl.network.network import Network, Pass

__all__ = ["Network", "Pass"]
