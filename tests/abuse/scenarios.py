"""The abuse streams in full, as phases that are scored each by itself against the model as shipped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from abuse.streams import (
    Attack,
    Batch,
    correlated,
    disturbing,
    extreme,
    iid,
    one_class,
    poisoned,
    recurring,
    runs,
    saturated,
)
from abuse.subjects import adapted, run, source_score

NO_LABEL = -1


@dataclass(frozen=True)
class Phase:
    """A stretch of a stream and how many points below the source a model may be in it (None: it is not scored)."""

    batches: list[Batch]
    allowed: float | None = 2.0


@dataclass
class Outcome:
    """One method on one scenario; accuracies in percent over all scored phases."""

    method: str
    scenario: str
    guard: bool
    accuracy: float
    source: float
    worst: float  # points above the source in the worst scored phase (negative: below)
    passed: bool
    batches: int
    counts: dict[str, int] = field(default_factory=dict)
    first: int | None = None  # batch of the guard's first action
    answered: list[float] = field(default_factory=list)  # accuracy of each scored phase


def contentless(batches: int, size: int = 32) -> list[Batch]:
    """Black, white, grey, and one image over and over; `batches` of each."""
    shape = (size, 3, 16, 16)
    one = iid("noise", 1, 1)[0][0].expand(*shape).contiguous()
    kinds: list[Tensor] = [torch.zeros(shape), torch.ones(shape), torch.full(shape, 0.4), one]
    nothing = torch.full((size,), NO_LABEL)
    return [(images, nothing) for images in kinds for _ in range(batches)]


def changing(images: int, seed: int = 3) -> list[Batch]:
    """Batches of 1 to 40 images."""
    g = torch.Generator().manual_seed(seed)
    (pool, labels), *_ = iid("noise", images, images, seed)
    sizes: list[int] = []
    while sum(sizes) < images:
        sizes.append(min(int(torch.randint(1, 41, (1,), generator=g)), images - sum(sizes)))
    return list(zip(pool.split(sizes), labels.split(sizes), strict=True))


def attacked(share: float, attack: Attack) -> list[Phase]:
    """An attack, twenty calm batches, and what follows."""
    during = poisoned(iid("noise", 32 * 40), share, attack)
    return [Phase(during, 5.0), Phase(iid("noise", 32 * 20, seed=1), None), Phase(iid("noise", 32 * 30, seed=2), 1.0)]


SCENARIOS: dict[str, Callable[[], list[Phase]]] = {
    "ordinary": lambda: [Phase(iid("noise", 3200)), Phase(iid("shifted", 3200))],
    "class-sorted": lambda: [Phase(correlated("noise", 3200))],
    "class-sorted, hard": lambda: [Phase(correlated("shifted", 3200))],
    "runs of a class": lambda: [Phase(runs("shifted", 3200))],
    "one class": lambda: [Phase(one_class("noise", 10_000, size=64)), Phase(iid("noise", 2048, size=64))],
    "recurring": lambda: [Phase(visit) for visit in recurring(20, 128)],
    "batch of 1": lambda: [Phase(iid("noise", 400, size=1), 2.0)],
    "batch of 2": lambda: [Phase(iid("noise", 400, size=2), 2.0)],
    "batch of 3": lambda: [Phase(iid("noise", 450, size=3), 2.0)],
    "batch of 7": lambda: [Phase(iid("noise", 700, size=7), 2.0)],
    "changing batch": lambda: [Phase(changing(1600), 2.0)],
    "no content": lambda: [Phase(contentless(50), None), Phase(iid("noise", 32 * 40), 1.0)],
    "extreme 5 %": lambda: attacked(0.05, extreme),
    "extreme 20 %": lambda: attacked(0.2, extreme),
    "in range 20 %": lambda: attacked(0.2, saturated),
    "crafted 5 %": lambda: attacked(0.05, disturbing),
    "crafted 20 %": lambda: attacked(0.2, disturbing),
}


@cache
def phases(name: str) -> tuple[list[Phase], list[float]]:
    """The phases of a scenario and the source's accuracy in each."""
    made = SCENARIOS[name]()
    return made, [source_score(phase.batches).accuracy for phase in made]


def play(method: str, scenario: str, guard: Any = True) -> Outcome:
    """Run one method through one scenario."""
    model = adapted(method, guard=guard)
    first: list[int] = []
    if model.guard is not None:
        model.guard.call_on_event(lambda event: first.append(event.batch) if event.action != "set_aside" else None)
    stretches, shipped = phases(scenario)
    scores = [run(model, phase.batches, strict=bool(guard)) for phase in stretches]
    scored = [k for k, phase in enumerate(stretches) if phase.allowed is not None]
    gaps = {k: scores[k].accuracy - shipped[k] for k in scored}
    images = sum(scores[k].images for k in scored)
    return Outcome(
        method=method,
        scenario=scenario,
        guard=bool(guard),
        accuracy=100.0 * sum(scores[k].right for k in scored) / images,
        source=sum(shipped[k] * scores[k].images for k in scored) / images,
        worst=min(gaps.values()),
        passed=all(gap >= -(stretches[k].allowed or 0.0) for k, gap in gaps.items()),
        batches=sum(len(phase.batches) for phase in stretches),
        counts={} if model.guard is None else {k: v for k, v in model.guard.counts.items() if v},
        first=first[0] if first else None,
        answered=[scores[k].accuracy for k in scored],
    )
