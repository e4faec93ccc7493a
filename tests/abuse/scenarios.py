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
VISITS = 20
MOST_FORGOTTEN = 2.0  # points that the last of many visits may be below the first


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
    images: int  # that were scored
    batches: int
    counts: dict[str, int] = field(default_factory=dict)
    first: int | None = None  # batch of the guard's first action
    forgotten: float | None = None  # points below the first visit in the last, where there are visits


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


def attacked(share: float, attack: Attack, scale: float) -> list[Phase]:
    """An attack, twenty calm batches, and what follows."""
    during = poisoned(iid("noise", 32 * round(40 * scale)), share, attack)
    after = iid("noise", 32 * round(40 * scale), seed=2)
    return [Phase(during, 5.0), Phase(iid("noise", 32 * 20, seed=1), None), Phase(after, 1.0)]


def _images(count: int, scale: float) -> int:
    return max(64, round(count * scale))


SCENARIOS: dict[str, Callable[[float], list[Phase]]] = {
    "ordinary": lambda k: [Phase(iid("noise", _images(3200, k)))],
    "ordinary, hard": lambda k: [Phase(iid("shifted", _images(3200, k)))],
    "class-sorted": lambda k: [Phase(correlated("noise", _images(3200, k)))],
    "class-sorted, hard": lambda k: [Phase(correlated("shifted", _images(3200, k)))],
    "runs of a class": lambda k: [Phase(runs("shifted", _images(3200, k)))],
    "one class": lambda k: [
        Phase(one_class("noise", _images(10_000, k), size=64)),
        Phase(iid("noise", 2048, size=64)),
    ],
    "recurring": lambda k: [Phase(visit) for visit in recurring(VISITS, _images(320, k))],
    "batch of 1": lambda k: [Phase(iid("noise", _images(1000, k), size=1), 1.0)],
    "batch of 2": lambda k: [Phase(iid("noise", _images(1000, k), size=2), 1.0)],
    "batch of 3": lambda k: [Phase(iid("noise", _images(1000, k), size=3), 1.0)],
    "batch of 7": lambda k: [Phase(iid("noise", _images(1000, k), size=7), 1.0)],
    "changing batch": lambda k: [Phase(changing(_images(3200, k)), 1.0)],
    "no content": lambda k: [Phase(contentless(round(50 * k)), None), Phase(iid("noise", _images(3200, k)), 1.0)],
    "extreme 5 %": lambda k: attacked(0.05, extreme, k),
    "extreme 20 %": lambda k: attacked(0.2, extreme, k),
    "in range 20 %": lambda k: attacked(0.2, saturated, k),
    "crafted 5 %": lambda k: attacked(0.05, disturbing, k),
    "crafted 20 %": lambda k: attacked(0.2, disturbing, k),
}


@cache
def phases(name: str, scale: float) -> tuple[list[Phase], list[float]]:
    """The phases of a scenario and the source's accuracy in each."""
    made = SCENARIOS[name](scale)
    return made, [source_score(phase.batches).accuracy for phase in made]


def play(method: str, scenario: str, guard: Any = True, scale: float = 1.0) -> Outcome:
    """Run one method through one scenario."""
    model = adapted(method, guard=guard)
    actions: list[int] = []
    if model.guard is not None:
        model.guard.call_on_event(lambda event: actions.append(event.batch) if event.action != "set_aside" else None)
    stretches, shipped = phases(scenario, scale)
    scores = [run(model, phase.batches, strict=bool(guard)) for phase in stretches]
    scored = [k for k, phase in enumerate(stretches) if phase.allowed is not None]
    gaps = {k: scores[k].accuracy - shipped[k] for k in scored}
    images = sum(scores[k].images for k in scored)
    forgotten = scores[0].accuracy - scores[-1].accuracy if len(scored) == VISITS else None
    return Outcome(
        method=method,
        scenario=scenario,
        guard=bool(guard),
        accuracy=100.0 * sum(scores[k].right for k in scored) / images,
        source=sum(shipped[k] * scores[k].images for k in scored) / images,
        worst=min(gaps.values()),
        passed=all(gap >= -(stretches[k].allowed or 0.0) for k, gap in gaps.items())
        and (forgotten is None or forgotten <= MOST_FORGOTTEN),
        images=images,
        batches=sum(len(phase.batches) for phase in stretches),
        counts={} if model.guard is None else {k: v for k, v in model.guard.counts.items() if v},
        first=actions[0] if actions else None,
        forgotten=forgotten,
    )


def alarms(method: str, shift: str, batches: int, size: int = 16) -> dict[str, Any]:
    """Feed a guarded model and its unguarded twin an ordinary stream; count what the guard did and what it cost."""
    stream = iid(shift, batches * size, size=size, seed=5)
    guarded, plain = adapted(method), adapted(method, guard=False)
    on, off = run(guarded, stream).accuracy, run(plain, stream, strict=False).accuracy
    counts = guarded.guard.counts if guarded.guard is not None else {}
    false = counts["freeze"]
    facts = {"batches": batches, "false_alarms": false, "on": on, "off": off}
    return facts | {"passed": false <= batches / 1000 and on >= off - 0.5}
