"""The figures behind the pictures, thinned to what a screen can show: plain lists, ready for the page's script."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.report.model import UNKNOWN, Experiment, Track, paired
from dpl.reproduce.style import COLOURS, colour

__all__ = ["SHOWN_CLASSES", "digest", "digest_methods"]

POINTS = (24, 100)  # of a curve: fewest, most
WINDOWS = (8, 30)
BUDGET = 60_000  # points of all curves of an experiment: keeps a page of thousands of them at a few megabytes
FEWEST = 16  # images of a window
SHOWN_CLASSES = 10  # with a colour of their own in the balance of classes; the others share one
WHOLE_CONFUSION = 14  # with more classes, only the commonest mistakes are listed
LISTED = 24
DASHES = ("", "6 3", "2 3", "8 3 2 3")

Floats = NDArray[np.float64]


def digest(experiment: Experiment) -> dict[str, Any]:
    """Return everything that the script draws for one experiment."""
    reference = experiment.reference
    return {
        "methods": digest_methods(experiment),
        "streams": list(experiment.streams),
        "classes": list(experiment.classes),
        "reference": None if reference is None else experiment.methods.index(reference),
        "labelled": experiment.labelled,
        "lines": [_stream_lines(experiment, stream) for stream in experiment.streams],
        "balance": [_balance(experiment, stream) for stream in experiment.streams],
        "confusion": [[_confusion(experiment, m, s) for m in experiment.methods] for s in experiment.streams],
        "by_class": [[_by_class(experiment, m, s) for m in experiment.methods] for s in experiment.streams],
        "domains": [_domains(experiment, method) for method in experiment.methods],
    }


def digest_methods(experiment: Experiment) -> list[dict[str, Any]]:
    """Return each method with its colour; those that share one differ in their dashes."""
    found: list[dict[str, Any]] = []
    used: Counter[str] = Counter()
    others = 0
    for label in experiment.methods:
        shade = colour(label, others)
        others += label not in COLOURS
        named = next((row["method"] for row in experiment.rows if row["label"] == label), label)
        found.append({"name": label, "method": named, "colour": shade, "dash": DASHES[used[shade] % len(DASHES)]})
        used[shade] += 1
    return found


def _stream_lines(experiment: Experiment, stream: str) -> dict[str, Any]:
    """Return the lines over one stream: cumulative accuracy, and confidence and agreement by windows."""
    tracks = {m: experiment.tracks[m, stream] for m in experiment.methods if (m, stream) in experiment.tracks}
    length = min((len(track) for each in tracks.values() for track in each), default=0)
    if not length:
        return {"n": 0, "seen": [], "ends": [], "accuracy": [], "confidence": [], "agreement": []}
    seen, ends = _seen(length, experiment), _ends(length, experiment)
    reference = tracks.get(experiment.reference or "", ())
    agree = [[_agreement(t, reference) for t in tracks.get(m, ())] for m in experiment.methods]
    has_reference = bool(reference)
    return {
        "n": length,
        "seen": (seen + 1).tolist(),
        "ends": ends.tolist(),
        "accuracy": [_band([_cumulative(t)[seen] for t in tracks.get(m, ())]) for m in experiment.methods]
        if experiment.labelled
        else [],
        "confidence": [
            _band([100 * _windows(t.confidence, ends) for t in tracks.get(m, ())]) for m in experiment.methods
        ],
        "agreement": [_band([100 * _windows(a, ends) for a in each if len(a) >= length]) for each in agree]
        if has_reference
        else [],
    }


def _fair_share(experiment: Experiment, bounds: tuple[int, int], budget: int) -> int:
    """Return how much detail each curve may have."""
    fewest, most = bounds
    return min(most, max(fewest, budget // (len(experiment.streams) * len(experiment.methods))))


def _seen(length: int, experiment: Experiment) -> NDArray[np.int64]:
    """Return after how many images a curve has a point; it begins where the mean says something."""
    points = _fair_share(experiment, POINTS, BUDGET)
    return np.unique(np.linspace(min(32, length) - 1, length - 1, min(points, length)).astype(np.int64))


def _ends(length: int, experiment: Experiment) -> NDArray[np.int64]:
    count = max(1, min(_fair_share(experiment, WINDOWS, BUDGET // 4), length // FEWEST))
    return np.linspace(0, length, count + 1).astype(np.int64)[1:]


def _cumulative(track: Track) -> Floats:
    """Return the accuracy in percent after each image, of those whose class is known."""
    known = np.cumsum(track.label != UNKNOWN)
    return np.asarray(100.0 * np.cumsum(track.correct) / np.maximum(known, 1), dtype=np.float64)


def _windows(values: NDArray[Any], ends: NDArray[np.int64]) -> Floats:
    """Return the mean of each window."""
    sums = np.concatenate([[0.0], np.cumsum(values[: ends[-1]].astype(np.float64))])
    starts = np.concatenate([[0], ends[:-1]])
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)


def _agreement(track: Track, reference: Sequence[Track]) -> NDArray[np.bool_]:
    """Return where a method answers as the source does, on the images that both saw."""
    other = next((t for t in reference if t.seed == track.seed), None)
    if other is None:
        return np.zeros(0, dtype=bool)
    first, second = paired(other, track)
    return np.equal(first.prediction, second.prediction)


def _band(lines: Sequence[Floats]) -> dict[str, list[float]] | None:
    """Return the mean over seeds, and the range where there are several; None for figures that are not known."""
    if not lines or not all(np.isfinite(line).all() for line in lines):
        return None
    stacked = np.stack(lines)
    band = {"mean": _short(stacked.mean(axis=0))}
    if len(lines) > 1:
        band |= {"low": _short(stacked.min(axis=0)), "high": _short(stacked.max(axis=0))}
    return band


def _short(values: Floats) -> list[float]:
    return [round(value, 2) for value in values.tolist()]


def _balance(experiment: Experiment, stream: str) -> dict[str, Any]:
    """Return the share of each class over the stream: true, and as predicted; rare classes are put together."""
    tracks = {m: experiment.tracks[m, stream][0] for m in experiment.methods if (m, stream) in experiment.tracks}
    if not tracks or not any(map(len, tracks.values())):
        return {"ends": [], "classes": [], "truth": None, "methods": []}
    first = next(iter(tracks.values()))
    count = len(experiment.classes)
    known = first.label[first.label != UNKNOWN]
    total = sum(np.bincount(t.prediction, minlength=count)[:count] for t in tracks.values()) / len(tracks)
    weight = total + np.bincount(known, minlength=count)[:count]
    shown = np.sort(np.argsort(-weight, kind="stable")[:SHOWN_CLASSES])
    ends = _ends(min(map(len, tracks.values())), experiment)
    return {
        "ends": ends.tolist(),
        "classes": shown.tolist(),
        "truth": _shares(first.label, shown, ends) if len(known) == len(first) else None,
        "methods": [_shares(tracks[m].prediction, shown, ends) if m in tracks else None for m in experiment.methods],
    }


def _shares(answers: NDArray[np.int64], shown: NDArray[np.int64], ends: NDArray[np.int64]) -> list[list[float]]:
    """Return for each shown class, and last for all others, its share of each window in percent."""
    parts = [100 * _windows(answers == number, ends) for number in shown]
    return [_short(part) for part in parts] + [_short(100 - np.sum(parts, axis=0))]


def _answers(experiment: Experiment, method: str | None, stream: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return true and predicted classes over all seeds, where the true one is known."""
    tracks = experiment.tracks.get((method or "", stream), ())
    none = np.zeros(0, dtype=np.int64)
    label, prediction = (
        np.concatenate([none, *(getattr(track, name) for track in tracks)]) for name in ("label", "prediction")
    )
    known = (label != UNKNOWN) & (prediction < len(experiment.classes))
    return label[known], prediction[known]


def _confusion(experiment: Experiment, method: str, stream: str) -> dict[str, Any] | None:
    """Return how often which class was taken for which: all counts, or of many classes the commonest mistakes."""
    label, prediction = _answers(experiment, method, stream)
    count = len(experiment.classes)
    if not len(label):
        return None
    if count <= WHOLE_CONFUSION:
        counts = np.bincount(label * count + prediction, minlength=count * count)
        return {"counts": counts.reshape(count, count).tolist()}
    wrong = label != prediction
    pairs, times = np.unique(label[wrong] * count + prediction[wrong], return_counts=True)
    order = np.argsort(-times, kind="stable")[:LISTED]
    columns = (pairs[order] // count, pairs[order] % count, times[order])
    return {"mistakes": [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]}


def _by_class(experiment: Experiment, method: str, stream: str) -> list[list[float | int | None]]:
    """Return class, images, accuracy and the source's accuracy; of many classes those that changed most."""
    ours, theirs = (_rates(experiment, name, stream) for name in (method, experiment.reference))
    present = np.flatnonzero(ours[0])
    change = np.abs(np.nan_to_num(ours[1] - theirs[1]))[present]
    kept = np.sort(present[np.argsort(-change, kind="stable")[:LISTED]])
    return [
        [int(k), int(ours[0][k]), round(float(ours[1][k]), 1), round(float(theirs[1][k]), 1) if theirs[0][k] else None]
        for k in kept
    ]


def _rates(experiment: Experiment, method: str | None, stream: str) -> tuple[NDArray[np.int64], Floats]:
    """Return for each class how many images it has, and the accuracy in percent (no number where it has none)."""
    label, prediction = _answers(experiment, method, stream)
    count = len(experiment.classes)
    total, hits = (np.bincount(part, minlength=count) for part in (label, label[label == prediction]))
    return total, np.where(total > 0, 100.0 * hits / np.maximum(total, 1), np.nan)


def _domains(experiment: Experiment, method: str) -> dict[str, float]:
    """Return the accuracy on each domain, mean over seeds: of mixed streams too."""
    found: dict[str, list[float]] = {}
    for row in experiment.of(method):
        inside = row.get("by_domain") or {}
        entries = {row["stream"]: row.get("accuracy")} if len(inside) < 2 else inside
        for name, value in entries.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: round(float(np.mean(values)), 2) for name, values in found.items()}
