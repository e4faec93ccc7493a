"""What the automatic choice would have chosen by hand, and why."""

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Recommendation"]


@dataclass(frozen=True)
class Recommendation:
    """A method with its settings, as `dpl.adapt` takes them, and the reasons."""

    method: str
    settings: dict[str, Any]
    why: list[str]
    information: dict[float, float] = field(default_factory=dict)  # nats, by the batch's share in the statistics
    regret: dict[str, float] = field(default_factory=dict)  # estimated share of answers lost in the trial, by candidate

    @property
    def call(self) -> str:
        """The line of Python that does by hand what was chosen."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"dpl.adapt(model, {self.method!r}{arguments})"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = asdict(self)
        plain["information"] = {str(share): nats for share, nats in self.information.items()}
        return plain | {"call": self.call}
