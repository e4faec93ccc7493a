"""`X+dpl`: any gradient method X with a loss of the DPL family added on the same forward pass.

`X+Y` works for every Y whose class names its loss as `term_class`, such as `eata+dpl_dagger`. X decides what trains,
which statistics and which output. Y's own settings have the prefix `dpl_`; `dpl_weight` is its weight. The labels of
the added loss are those of the pass that X learns from: for adacontrast, whose own labels come from a vote of
neighbours on a weak view, they are the network's predictions on the strong view. One rule says when to step: a part
with nothing to learn from adds nothing, and where neither has anything, no weight moves.
"""

import dataclasses
from dataclasses import fields, make_dataclass
from typing import Any

from dpl.core.errors import SettingError
from dpl.core.settings import setting
from dpl.methods.base import GradientMethod, Method, Term
from dpl.methods.registry import get_method
from dpl.methods.settings import GradientSettings
from dpl.network import Network

__all__ = ["with_added_loss"]


def with_added_loss(name: str, added: str) -> type[GradientMethod[Any]]:
    """Return the class of `<name>+<added>`."""
    base, member, both = get_method(name), get_method(added), f"{name}+{added}"
    term_class: Any = getattr(member, "term_class", None)
    if term_class is None:
        raise SettingError(f"{both!r}: {added!r} is not a loss that can be added; use a member of the DPL family")
    if hasattr(base, "term_class"):
        raise SettingError(f"{both!r}: {name!r} uses the DPL loss already; use it without '+{added}'")
    if not issubclass(base, GradientMethod):
        raise SettingError(f"{both!r}: {name!r} does not train by gradient; '+{added}' needs a method that does")
    own = _own_fields(member)

    class WithAddedLoss(base):  # type: ignore[valid-type, misc]
        __doc__ = base.__doc__
        settings_class = _settings(base, member)
        dpl: Term
        info = dataclasses.replace(
            base.info,
            name=both,
            paper=f"{base.info.paper}; with the loss of {added} added",
            needs_classifier=True,
        )

        def __init__(self, network: Network, settings: GradientSettings) -> None:
            super().__init__(network, settings)
            values = {field.name: getattr(settings, f"dpl_{field.name}") for field in own}
            self.declare_part("dpl", term_class(network, member.settings_class(**values), self.random))
            self.dpl.weight = settings.dpl_weight  # type: ignore[attr-defined]
            self.terms.append(self.dpl)

    return WithAddedLoss


def _own_fields(member: type[Method[Any]]) -> list["dataclasses.Field[Any]"]:
    """Return the settings of a member that are not about training: X has its own of those."""
    shared = {field.name for field in fields(GradientSettings)} | {"mixed_only"}
    return [field for field in fields(member.settings_class) if field.name not in shared]


def _settings(base: type[Method[Any]], member: type[Method[Any]]) -> type[Any]:
    """Return X's settings with `dpl_weight` and those of the added loss, each with the prefix `dpl_`."""
    weight = ("dpl_weight", float, setting(1.0, "weight of the added loss", low=0))
    added = [
        (f"dpl_{field.name}", field.type, dataclasses.field(default=field.default, metadata=field.metadata))
        for field in _own_fields(member)
    ]
    kind = base.settings_class
    return make_dataclass(f"{kind.__name__}WithDPL", [weight, *added], bases=(kind,), frozen=True, kw_only=True)
