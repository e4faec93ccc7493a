"""The protocols: which domains come when, how samples are ordered, and when the model is reset."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Literal, NamedTuple

import numpy as np

from dpl.core.errors import SettingError, did_you_mean
from dpl.core.settings import whole_number
from dpl.streams import orders
from dpl.streams.domain import Domain, IntArray, Segment

__all__ = ["PROTOCOLS", "Protocol", "plan"]

GRADUAL_SEVERITIES = (1, 2, 3, 4, 5, 4, 3, 2, 1)  # up and down again
ORDERS = ("numpy", "python")
DELTAS = (1e-9, 1e9)  # outside this range proportions overflow or are 0 and 1


class Protocol(NamedTuple):
    """One protocol: its sequence of domains, its resets and its order within a segment."""

    name: str
    walk: Literal["once", "gradual", "mixed", "recurring"]
    reset: Literal["start", "each"]
    correlated: bool
    summary: str


PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol("reset_each_shift", "once", "each", False, "every domain and severity from the source model"),
        Protocol("continual", "once", "start", False, "one domain after the other, never reset"),
        Protocol("gradual", "gradual", "start", False, "each domain's severity rises and falls, never reset"),
        Protocol("mixed_domains", "mixed", "start", False, "all domains shuffled into one stream"),
        Protocol("correlated", "once", "start", True, "continual, with the classes correlated in time"),
        Protocol("recurring", "recurring", "start", False, "the sequence of domains again and again, never reset"),
        Protocol("mixed_domains_correlated", "mixed", "start", True, "all domains in one class-correlated stream"),
        Protocol("reset_each_shift_correlated", "once", "each", True, "class-correlated domains, each from the source"),
        Protocol("gradual_correlated", "gradual", "start", True, "rising and falling severity, class-correlated"),
    )
}  # fmt: skip


class _Stop(NamedTuple):
    """A segment before its samples are put in order."""

    name: str
    severity: int | None
    members: tuple[int, ...]
    visit: int = 0


def plan(
    protocol: str,
    domains: Sequence[Domain],
    *,
    seed: int = 0,
    order: str = "numpy",
    delta: float | None = None,
    visits: int | None = None,
    imbalance: float | None = None,
    outliers: Domain | None = None,
) -> list[Segment]:
    """Return the segments of a stream of `domains` under the named protocol.

    `order="numpy"` shuffles every segment on its own, by the seed and by the segment's name and visit alone.
    `order="python"` seeds Python's generator again for each segment, so that domains of equal length share one
    permutation, as in the RMT library. `delta` turns the class-sorted order of the correlated protocols into a
    Dirichlet one. `visits` is for `recurring`: the number of passes over the sequence.

    `imbalance` shifts the labels: the most frequent class of a segment has so many times the samples of the rarest.
    `outliers` are samples of no known class that are mixed into every segment; in index rows their domain has the
    number `len(domains)`.
    """
    if protocol not in PROTOCOLS:
        raise SettingError(f"unknown protocol {protocol!r}. {did_you_mean(str(protocol), PROTOCOLS)}")
    chosen = PROTOCOLS[protocol]
    seed = whole_number("seed", seed, least=0)
    _check_settings(chosen, order, delta, visits, imbalance)
    _check_domains(domains)
    walk = _WALKS[chosen.walk](domains)
    stops = [stop._replace(visit=stop.visit + lap) for lap in range(visits or 1) for stop in walk]
    segments: list[Segment] = []
    for stop in stops:
        rows, labels = _gather(domains, stop.members)
        generator = orders.seeded(seed, stop.name, stop.visit)
        arrival = _arrange(chosen, labels, generator, seed, order, delta)
        if imbalance is not None:
            arrival = orders.long_tailed(labels, arrival, imbalance, generator)
        rows = rows[arrival]
        if outliers is not None:
            drawn = generator.permutation(len(outliers))
            rows = orders.with_outliers(rows, _index_rows(len(domains), outliers)[drawn], generator)
        reset = chosen.reset == "each" or not segments
        segments.append(Segment(stop.name, rows, reset, stop.severity, stop.visit))
    return segments


def _arrange(
    protocol: Protocol,
    labels: IntArray,
    generator: np.random.Generator,
    seed: int,
    order: str,
    delta: float | None,
) -> IntArray:
    """Return the positions of a segment's samples in order of arrival."""
    size = len(labels)
    base = orders.python_shuffle(size, seed) if order == "python" else generator.permutation(size)
    if not protocol.correlated:
        return base
    return orders.by_class(labels, base) if delta is None else orders.dirichlet(labels, base, delta, generator)


def _gather(domains: Sequence[Domain], members: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return the index rows [n, 2] and the labels [n] of some domains, one domain after the other."""
    rows = [_index_rows(i, domains[i]) for i in members]
    return np.concatenate(rows), np.concatenate([domains[i].labels for i in members])


def _index_rows(number: int, domain: Domain) -> IntArray:
    return np.stack([np.full(len(domain), number), domain.samples], axis=1)


def _once(domains: Sequence[Domain]) -> list[_Stop]:
    """Visit every domain in the order given."""
    return [_Stop(domain.title, domain.severity, (i,)) for i, domain in enumerate(domains)]


def _gradual(domains: Sequence[Domain]) -> list[_Stop]:
    """Visit every domain at severities 1 to 5 and back to 1 before the next domain begins."""
    places = {(domain.name, domain.severity): i for i, domain in enumerate(domains)}
    names = dict.fromkeys(domain.name for domain in domains)
    odd = places.keys() ^ {(name, severity) for name in names for severity in GRADUAL_SEVERITIES}
    if odd:
        listed = ", ".join(sorted(f"{name}@{severity}" for name, severity in odd))
        raise SettingError(f"a gradual stream needs each domain at severities 1 to 5; missing or extra: {listed}")
    return [
        _Stop(f"{name}@{severity}", severity, (places[name, severity],), int(step > GRADUAL_SEVERITIES.index(5)))
        for name in names
        for step, severity in enumerate(GRADUAL_SEVERITIES)
    ]


def _mixed(domains: Sequence[Domain]) -> list[_Stop]:
    """Put all domains of one severity together."""
    members: dict[int | None, list[int]] = {}
    for i, domain in enumerate(domains):
        members.setdefault(domain.severity, []).append(i)
    return [
        _Stop("mixed" if severity is None else f"mixed@{severity}", severity, tuple(places))
        for severity, places in members.items()
    ]


_WALKS: Mapping[str, Callable[[Sequence[Domain]], list[_Stop]]] = {
    "once": _once,
    "recurring": _once,
    "gradual": _gradual,
    "mixed": _mixed,
}


def _check_settings(
    protocol: Protocol, order: str, delta: float | None, visits: int | None, imbalance: float | None
) -> None:
    """Refuse settings that are wrong, or that the protocol would silently ignore."""
    if order not in ORDERS:
        raise SettingError(f"unknown order {order!r}. {did_you_mean(str(order), ORDERS)}")
    if delta is not None:
        _check_delta(protocol, order, delta)
    if (visits is not None) != (protocol.walk == "recurring"):
        advice = "must be given for" if visits is None else "is for 'recurring' only, leave it out for"
        raise SettingError(f"visits {advice} {protocol.name!r}")
    if visits is not None:
        whole_number("visits", visits, least=1)
    if imbalance is not None and not (isinstance(imbalance, Real) and 1 <= imbalance <= DELTAS[1]):
        raise SettingError(f"imbalance={imbalance!r}: expected a number of at least 1, such as 10")


def _check_domains(domains: Sequence[Domain]) -> None:
    """Refuse an empty list and repeated domains."""
    if not domains:
        raise SettingError("domains is empty: a stream needs at least one")
    counts = Counter(domain.title for domain in domains)
    if twice := sorted(title for title, count in counts.items() if count > 1):
        raise SettingError(f"domains must differ in name or severity; given more than once: {', '.join(twice)}")


def _check_delta(protocol: Protocol, order: str, delta: float) -> None:
    """Refuse a Dirichlet parameter where none is used, or one that its draws cannot represent."""
    if not protocol.correlated:
        raise SettingError(f"delta is for correlated protocols; {protocol.name!r} is not one, leave it out")
    if order == "python":
        raise SettingError("delta needs order='numpy'; with order='python' leave delta out to sort by class")
    if isinstance(delta, bool) or not isinstance(delta, Real) or not DELTAS[0] <= delta <= DELTAS[1]:
        raise SettingError(
            f"delta must be a number from {DELTAS[0]:g} to {DELTAS[1]:g}, got {delta!r}; leave it out to sort by class"
        )
