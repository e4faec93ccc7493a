"""The protocols: which domains come when, how samples are ordered, and when the model is reset."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from dpl.core.errors import SettingError, did_you_mean
from dpl.core.settings import Checked, make_settings, setting, whole_number
from dpl.streams.domain import Domain, IntArray, Segment

__all__ = ["PROTOCOLS", "Order", "Protocol", "plan", "seeded"]

GRADUAL_SEVERITIES = (1, 2, 3, 4, 5, 4, 3, 2, 1)  # up and down again


class Protocol(NamedTuple):
    """One protocol: its sequence of domains, its resets and its order within a segment."""

    walk: Literal["once", "gradual", "mixed", "recurring"]
    reset: Literal["start", "each"]
    correlated: bool
    summary: str


PROTOCOLS: Mapping[str, Protocol] = {
    "reset_each_shift": Protocol("once", "each", False, "every domain and severity from the source model"),
    "continual": Protocol("once", "start", False, "one domain after the other, never reset"),
    "gradual": Protocol("gradual", "start", False, "each domain's severity rises and falls, never reset"),
    "mixed_domains": Protocol("mixed", "start", False, "all domains shuffled into one stream"),
    "correlated": Protocol("once", "start", True, "continual, with the classes correlated in time"),
    "recurring": Protocol("recurring", "start", False, "the sequence of domains again and again, never reset"),
    "mixed_domains_correlated": Protocol("mixed", "start", True, "all domains in one class-correlated stream"),
    "reset_each_shift_correlated": Protocol("once", "each", True, "class-correlated domains, each from the source"),
    "gradual_correlated": Protocol("gradual", "start", True, "rising and falling severity, class-correlated"),
}


@dataclass(frozen=True, kw_only=True)
class Order(Checked):
    """In which order the samples of a segment arrive, and how often a segment comes."""

    order: str = setting("numpy", "generator that shuffles a stream", choices=("numpy", "python"))
    # Outside this range proportions overflow or are 0 and 1.
    delta: float | None = setting(None, "Dirichlet concentration of correlated streams", low=1e-9, high=1e9)
    visits: int | None = setting(None, "how often a recurring stream repeats its domains", low=1)
    imbalance: float | None = setting(None, "label shift: most frequent class over rarest", low=1, later=True)


_Stop = tuple[str, int | None, tuple[int, ...], int]  # name, severity, domains and visit of a segment


def plan(
    protocol: str, domains: Sequence[Domain], *, seed: int = 0, outliers: Domain | None = None, **options: Any
) -> list[Segment]:
    """Return the segments of a stream of `domains` under the named protocol; the options are those of `Order`.

    `order="numpy"` shuffles every segment on its own, by the seed and by the segment's name and visit alone.
    `order="python"` seeds Python's generator again for each segment, so that domains of equal length share one
    permutation, as in the RMT library.

    `outliers` are samples of no known class that are mixed into every segment; in index rows their domain has the
    number `len(domains)`.
    """
    if protocol not in PROTOCOLS:
        raise SettingError(f"unknown protocol {protocol!r}. {did_you_mean(str(protocol), PROTOCOLS)}")
    chosen = PROTOCOLS[protocol]
    seed = whole_number("seed", seed, least=0)
    wanted = make_settings(Order, "a stream", options)
    _check(protocol, domains, wanted)
    segments: list[Segment] = []
    for lap, (name, severity, members, way) in product(range(wanted.visits or 1), _WALKS[chosen.walk](domains)):
        visit = lap + way
        sizes = [(i, len(domains[i])) for i in members]
        rows = np.concatenate([np.column_stack([np.full(size, i), np.arange(size)]) for i, size in sizes])
        labels = np.concatenate([domains[i].labels for i in members])
        generator = seeded(seed, name, visit)
        by_python = wanted.order == "python"
        arrival = _python_shuffle(len(rows), seed) if by_python else generator.permutation(len(rows))
        if chosen.correlated:  # within a class the order stays
            arrival = arrival[np.argsort(labels[arrival], kind="stable")]
        if wanted.delta is not None:
            arrival = _dirichlet(arrival, labels, wanted.delta, generator)
        if wanted.imbalance is not None:
            arrival = _long_tailed(arrival, labels, wanted.imbalance, generator)
        rows = rows[arrival]
        if outliers is not None:
            rows = _with_outliers(rows, len(domains), len(outliers), generator)
        segments.append(Segment(name, rows, chosen.reset == "each" or not segments, severity, visit))
    return segments


def seeded(seed: int, *parts: str | int) -> np.random.Generator:
    """Return a generator for one part of a plan, independent of all other parts."""
    digest = sha256(repr(parts).encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:16], "little")])


def _python_shuffle(size: int, seed: int) -> IntArray:
    """Shuffle with Python's generator, newly seeded: equal lengths get equal orders."""
    positions = list(range(size))
    random.Random(seed).shuffle(positions)  # noqa: S311 - an order to reproduce, not a secret
    return np.array(positions, dtype=np.int64)


def _dirichlet(ordered: IntArray, labels: IntArray, delta: float, generator: np.random.Generator) -> IntArray:
    """Spread positions, ordered by class, over slots of time by the rule of docs/protocols.md; a slot may be empty."""
    groups = np.split(ordered, np.flatnonzero(np.diff(labels[ordered])) + 1)
    slots: list[list[IntArray]] = [[] for _ in groups]
    filled = np.zeros(len(groups), dtype=np.int64)
    for members in groups:
        unfilled = np.flatnonzero(filled < len(labels) / len(groups))  # never empty: one pass places every sample
        shares = generator.dirichlet(np.full(len(unfilled), delta))
        cuts = (np.cumsum(shares[:-1]).clip(0, 1) * len(members)).astype(np.int64)
        bounds = np.concatenate(([0], cuts, [len(members)]))
        for piece in np.flatnonzero(np.diff(bounds)):
            slots[unfilled[piece]].append(members[bounds[piece] : bounds[piece + 1]])
        filled[unfilled] += np.diff(bounds)
    return np.concatenate([slot[i] for slot in slots for i in generator.permutation(len(slot))])


def _long_tailed(arrival: IntArray, labels: IntArray, imbalance: float, generator: np.random.Generator) -> IntArray:
    """Keep the first samples of each class, at least one; sizes fall exponentially, as in CIFAR-LT, in random order."""
    classes, counts = np.unique(labels, return_counts=True)
    rank = generator.permutation(len(classes)) / max(len(classes) - 1, 1)
    sizes = np.maximum(1, np.floor(counts.min() * imbalance**-rank)).astype(np.int64)
    kept = [np.flatnonzero(labels[arrival] == name)[:size] for name, size in zip(classes, sizes, strict=True)]
    return arrival[np.sort(np.concatenate(kept))]


def _with_outliers(rows: IntArray, number: int, count: int, generator: np.random.Generator) -> IntArray:
    """Insert the samples of a domain of outliers at random places; all others keep their order."""
    outliers = np.column_stack([np.full(count, number), generator.permutation(count)])
    places = np.sort(generator.permutation(len(rows) + count)[:count])
    return np.insert(rows, places - np.arange(count), outliers, axis=0)


def _once(domains: Sequence[Domain]) -> list[_Stop]:
    return [(domain.title, domain.severity, (i,), 0) for i, domain in enumerate(domains)]


def _gradual(domains: Sequence[Domain]) -> list[_Stop]:
    """Visit every domain at severities 1 to 5 and back to 1 before the next domain begins."""
    places = {(domain.name, domain.severity): i for i, domain in enumerate(domains)}
    names = dict.fromkeys(domain.name for domain in domains)
    odd = places.keys() ^ {(name, severity) for name in names for severity in GRADUAL_SEVERITIES}
    if odd:
        listed = ", ".join(sorted(f"{name}@{severity}" for name, severity in odd))
        raise SettingError(f"a gradual stream needs each domain at severities 1 to 5; missing or extra: {listed}")
    return [
        (f"{name}@{severity}", severity, (places[name, severity],), int(step > GRADUAL_SEVERITIES.index(5)))
        for name in names
        for step, severity in enumerate(GRADUAL_SEVERITIES)
    ]


def _mixed(domains: Sequence[Domain]) -> list[_Stop]:
    levels = dict.fromkeys(domain.severity for domain in domains)
    members = {level: tuple(i for i, domain in enumerate(domains) if domain.severity == level) for level in levels}
    return [("mixed" if s is None else f"mixed@{s}", s, places, 0) for s, places in members.items()]


_WALKS: Mapping[str, Callable[[Sequence[Domain]], list[_Stop]]] = {
    "once": _once, "recurring": _once, "gradual": _gradual, "mixed": _mixed,
}  # fmt: skip


def _check(protocol: str, domains: Sequence[Domain], wanted: Order) -> None:
    """Refuse what does not fit together, or what the protocol would silently ignore."""
    counts = Counter(domain.title for domain in domains)
    twice = ", ".join(sorted(title for title, count in counts.items() if count > 1))
    recurring = PROTOCOLS[protocol].walk == "recurring"
    conflicts = [
        (wanted.delta is not None and not PROTOCOLS[protocol].correlated,
         f"delta is for correlated protocols; {protocol!r} is not one, leave it out"),
        (wanted.delta is not None and wanted.order == "python",
         "delta needs order='numpy'; with order='python' leave delta out to sort by class"),
        (wanted.visits is None and recurring, f"visits must be given for {protocol!r}"),
        (wanted.visits is not None and not recurring,
         f"visits is for 'recurring' only, leave it out for {protocol!r}"),
        (not domains, "domains is empty: a stream needs at least one"),
        (twice, f"domains must differ in name or severity; given more than once: {twice}"),
    ]  # fmt: skip
    for is_wrong, message in conflicts:
        if is_wrong:
            raise SettingError(message)
