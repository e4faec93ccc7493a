"""The conformance suite: what every method promises, checked on any network. It uses the public model alone.

    from dpl.testing import check_method
    check_method("my_method", network, batches)

Each check is a function of a `Subject` that raises AssertionError with a sentence; `check_method` runs them all.
"""

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpl.methods.settings import GradientSettings
from dpl.model.adaptive import AdaptiveModel, adapt
from dpl.model.load import load

__all__ = ["CHECKS", "Subject", "changed_keys", "check_method"]


@dataclass
class Subject:
    """A method with everything needed to run it."""

    method: str
    network: nn.Module
    batches: Sequence[Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: Any = None

    def adapt(self) -> AdaptiveModel:
        """Wrap the network anew."""
        return adapt(self.network, self.method, source=self.source, **self.settings)

    def load(self, snapshot: Path) -> AdaptiveModel:
        """Load a snapshot of the method; settings that a file cannot hold are given again."""
        functions = {name: value for name, value in self.settings.items() if callable(value)}
        return load(snapshot, self.network, source=self.source, **functions)

    def run(self, model: AdaptiveModel, steps: int, start: int = 0) -> list[Tensor]:
        """Feed `steps` batches of the endless repetition of the given ones."""
        return [model(self.batches[i % len(self.batches)]) for i in range(start, start + steps)]


def check_method(
    method: str, network: nn.Module, batches: Sequence[Tensor], *, source: Any = None, **settings: Any
) -> None:
    """Run every check; raise AssertionError naming the first promise that is broken."""
    for check in CHECKS:
        check(Subject(method, network, batches, settings, source))


def reset_is_exact(subject: Subject, steps: int = 50) -> None:
    """After many steps `reset()` gives back every bit: weights, optimizer, memory, generator; keys unchanged."""
    model = subject.adapt()
    before, logits = model.state_dict(), model.predict(subject.batches[0])
    first = subject.run(model, 3)
    subject.run(model, steps - 3, start=3)
    model.reset()
    _same_state(before, model.state_dict(), "reset")
    _require(torch.equal(logits, model.predict(subject.batches[0])), "reset gives other predictions")
    again = subject.run(model, 3)
    _require(_all_equal(first, again), "a stream replayed after reset gives other logits")
    _require(list(model.model.state_dict()) == list(subject.network.state_dict()), "state_dict keys changed")


def caller_is_untouched(subject: Subject, steps: int = 3) -> None:
    """The caller's network, the images, the global generator and the grad mode stay as they were."""

    def kinds() -> dict[str, list[Any]]:
        return {
            "requires_grad changed": [parameter.requires_grad for parameter in subject.network.parameters()],
            "a module of the caller changed its class": [type(module) for module in subject.network.modules()],
            "a module of the caller changed its mode": [module.training for module in subject.network.modules()],
        }

    weights, random = copy.deepcopy(subject.network.state_dict()), torch.get_rng_state()
    before, pixels = kinds(), [batch.clone() for batch in subject.batches]
    subject.run(subject.adapt(), steps)
    _same_state(weights, subject.network.state_dict(), "adapting")
    for change, found in kinds().items():
        _require(found == before[change], change)
    _require(_all_equal(pixels, subject.batches), "the images were changed in place")
    _require(torch.equal(random, torch.get_rng_state()), "the global random generator was used")


def predict_changes_nothing(subject: Subject) -> None:
    """`predict` leaves every bit of the state alone and says the same twice."""
    model = subject.adapt()
    subject.run(model, 2)
    before = model.state_dict()
    first, second = model.predict(subject.batches[0]), model.predict(subject.batches[0])
    _same_state(before, model.state_dict(), "predict")
    _require(torch.equal(first, second), "predict answers differently the second time")


def stays_finite(subject: Subject) -> None:
    """Odd batches never make a logit, a parameter or a memory non-finite."""
    model, normal = subject.adapt(), subject.batches[0]
    alike = normal[:1].expand_as(normal)
    odd = [normal, normal[:1], normal[:2], normal[: len(normal) - 1], torch.zeros_like(normal), torch.ones_like(normal)]
    odd += [alike.clone(), normal[:1], normal, *(alike + 0.01 * batch for batch in subject.batches), normal]
    for images in odd:
        logits = model(images)
        _require(logits.shape[0] == len(images) and logits.ndim == 2, f"logits have shape {tuple(logits.shape)}")
        _require(bool(logits.isfinite().all()), f"non-finite logits for a batch of {tuple(images.shape)}")
        _require(not logits.requires_grad, "the returned logits hold on to the graph")
        # Infinity may mark an empty place in a memory; in the network it would be a fault.
        state = {key: value.float() for key, value in model.state_dict().items()}
        bad = [k for k, v in state.items() if v.isnan().any() or (k.startswith("model.") and v.isinf().any())]
        _require(not bad, f"non-finite state {bad[:3]} after a batch of {tuple(images.shape)}")


def last_is_filled(subject: Subject) -> None:
    """`last` says whether there was an update, and why not if there was none."""
    model = subject.adapt()
    _require(model.last["updated"] is False, "`last` claims an update before the first batch")
    subject.run(model, 2)
    _require("updated" in model.last, "`last` does not say whether the model was updated")
    _require(bool(model.last["updated"]) or "loss" in model.last or "reason" in model.last, "`last` gives no reason")


def resumes_exactly(subject: Subject, cut: int = 4, more: int = 8) -> None:
    """State saved and loaded, in this process, continues with equal bits."""
    straight = subject.adapt()
    expected = subject.run(straight, cut + more)[cut:]
    stopped = subject.adapt()
    subject.run(stopped, cut)
    with tempfile.TemporaryDirectory() as folder:
        resumed = subject.load(stopped.save(Path(folder) / "snapshot"))
    _require(_all_equal(expected, subject.run(resumed, more, start=cut)), "a resumed stream gives other logits")
    resumed.reset()
    straight.reset()
    _same_state(straight.state_dict(), resumed.state_dict(), "reset of a loaded model")


def rolls_back(subject: Subject) -> None:
    """`load_state_dict` of an earlier `state_dict` is an exact way back."""
    model = subject.adapt()
    subject.run(model, 2)
    earlier = model.state_dict()
    expected = subject.run(model, 3, start=2)
    model.load_state_dict(earlier)
    _same_state(earlier, model.state_dict(), "rollback")
    _require(_all_equal(expected, subject.run(model, 3, start=2)), "a stream replayed after rollback differs")


def copies_are_independent(subject: Subject) -> None:
    """A deep copy adapts on its own."""
    model = subject.adapt()
    subject.run(model, 2)
    twin = copy.deepcopy(model)
    before = model.state_dict()
    subject.run(twin, 2, start=2)
    _same_state(before, model.state_dict(), "adapting a copy")


def selected_samples_suffice(subject: Subject, steps: int = 3) -> None:
    """The update is the same whether the whole batch or only the method's candidates are differentiated."""
    if not isinstance(subject.adapt().settings, GradientSettings):
        return
    forms = [replace(subject, settings={**subject.settings, "second_pass": form}) for form in ("never", "always")]
    whole, selected = (form.adapt() for form in forms)
    for ours, plain in zip(subject.run(selected, steps), subject.run(whole, steps), strict=True):
        _require(torch.allclose(ours, plain, atol=1e-3), "candidates() leaves out samples that loss() learns from")
    updated = [bool(model.last["updated"]) for model in (selected, whole)]
    _require(updated[0] == updated[1], "candidates() changes whether a step is taken")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    reset_is_exact,
    caller_is_untouched,
    predict_changes_nothing,
    stays_finite,
    last_is_filled,
    resumes_exactly,
    rolls_back,
    copies_are_independent,
    selected_samples_suffice,
)


def changed_keys(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the first keys that only one of two states has, or whose values differ."""
    alone = sorted(before.keys() ^ after.keys())
    return (alone or [key for key, value in before.items() if not torch.equal(value, after[key])])[:4]


def _same_state(before: Mapping[str, Tensor], after: Mapping[str, Tensor], what: str) -> None:
    _require(list(before) == list(after), f"{what} changed the state's keys: {set(before) ^ set(after)}")
    changed = changed_keys(before, after)
    _require(not changed, f"{what} changed {changed}")


def _all_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)
