"""How accurate the model is now, without labels: `model.estimate()`.

`signals` has the estimate itself, on logits, and what labelled source data show; `difference` says which model is
better without such data; `watch` looks at a stream. It knows predictions and states, and must not know a particular
method, nor act on what it finds: that is the guard's.
"""

from dpl.estimate.difference import Comparison
from dpl.estimate.settings import EstimateSettings
from dpl.estimate.watch import WORSE, Estimate, Watch

__all__ = ["WORSE", "Comparison", "Estimate", "EstimateSettings", "Watch"]
