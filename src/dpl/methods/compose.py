"""`X+dpl`: any gradient method X with the DPL loss added on the same forward pass, coefficient 1."""

import dataclasses
from dataclasses import fields, make_dataclass
from typing import Any

from dpl.core.errors import SettingError
from dpl.methods.base import GradientMethod, Method
from dpl.methods.dpl import DPLSettings, DPLTerm
from dpl.methods.registry import get_method
from dpl.methods.settings import GradientSettings
from dpl.network import Network

__all__ = ["with_dpl"]

# What the added term can be told, as `dpl_confidence=...` and so on; X keeps its own settings.
_ADDED = ("confidence", "temperature", "momentum", "reg_weight", "memory_grad")


def with_dpl(name: str) -> type[GradientMethod[Any]]:
    """Return the class of `<name>+dpl`: X decides what trains, which statistics and which output."""
    base = get_method(name)
    if name.startswith("dpl"):
        raise SettingError(f"'{name}+dpl': {name!r} uses the DPL loss already; use it without '+dpl'")
    if not issubclass(base, GradientMethod):
        raise SettingError(f"'{name}+dpl': {name!r} does not train by gradient; '+dpl' needs a method that does")

    class WithDPL(base):  # type: ignore[valid-type, misc]
        __doc__ = base.__doc__
        settings_class = _settings(base)
        dpl: DPLTerm
        info = dataclasses.replace(
            base.info, name=f"{name}+dpl", paper=f"{base.info.paper}; with the DPL loss added", needs_classifier=True
        )

        def __init__(self, network: Network, settings: GradientSettings) -> None:
            super().__init__(network, settings)
            own = {key: getattr(settings, f"dpl_{key}") for key in _ADDED}
            self.declare_part("dpl", DPLTerm(network, DPLSettings(**own), self.random))
            self.terms.append(self.dpl)

    return WithDPL


def _settings(base: type[Method[Any]]) -> type[Any]:
    added = [
        (f"dpl_{field.name}", field.type, dataclasses.field(default=field.default, metadata=field.metadata))
        for field in fields(DPLSettings)
        if field.name in _ADDED
    ]
    kind = base.settings_class
    return make_dataclass(f"{kind.__name__}WithDPL", added, bases=(kind,), frozen=True, kw_only=True)
