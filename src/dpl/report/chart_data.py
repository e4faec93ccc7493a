"""The data that the page's script draws: plain lists, thinned to what a screen can show."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.bench.tables import frame
from dpl.report.runs import UNKNOWN, Experiment, Integers
from dpl.report.summary import shown
from dpl.reproduce.plotting import COLOURS, colour

__all__ = ["chart_data"]

Floats = NDArray[np.float64]
_CURVE_POINTS = 60_000  # of all curves of an experiment: keeps a page of thousands of curves at a few megabytes
_FEW_CLASSES = 10  # so many have a colour in the class balance, and a confusion matrix instead of a list of mistakes
_LISTED = 24  # classes or mistakes in a list
_MARKED = 200  # actions of the guard on the curves; the table has them all


def chart_data(experiment: Experiment) -> dict[str, Any]:
    """Return everything that the script draws for one experiment."""
    methods, streams, reference = experiment.methods, experiment.streams, experiment.reference
    return {
        "methods": _line_styles(experiment),
        "streams": list(streams),
        "classes": list(experiment.classes),
        "reference": None if reference is None else methods.index(reference),
        "lines": [_lines(experiment, stream) for stream in streams],
        "balance": [_balance(experiment, stream) for stream in streams],
        "confusion": [[_confusion(_counts(experiment, method, stream)) for method in methods] for stream in streams],
        "by_class": [[_by_class(experiment, method, stream) for method in methods] for stream in streams],
        "by_domain": [_by_domain(experiment, method) for method in methods],
        "events": [
            {"method": methods.index(event["method"]), "seen": event["seen"], "alarm": event["alarm"]}
            | {"text": f"batch {event['batch']}: {event['action']}: {event['reason']}"}
            for event in experiment.events[:_MARKED]
        ],
    }


def _line_styles(experiment: Experiment) -> list[dict[str, str]]:
    """Return each method with the colour and dashes of its line; methods of the same colour differ in dashes."""
    others = [name for name in experiment.methods if name not in COLOURS]
    shades = [colour(name, others.index(name) if name in others else 0) for name in experiment.methods]
    dashes = [("", "6 3", "2 3", "8 3 2 3")[shades[:place].count(shade) % 4] for place, shade in enumerate(shades)]
    lines = zip(experiment.methods, shades, dashes, strict=True)
    return [{"name": method, "colour": shade, "dash": dash} for method, shade, dash in lines]


def _lines(experiment: Experiment, stream: str) -> dict[str, Any]:
    """Return the curves over one stream: accuracy so far; confidence, and agreement with the source, by windows."""
    traces = [[*experiment.traces.get((method, stream), {}).values()] for method in experiment.methods]
    length = min((len(trace) for each in traces for trace in each), default=0)
    if not length:
        return {"seen": [], "ends": [], "accuracy": [], "confidence": [], "agreement": []}
    first, most = min(32, length) - 1, min(_detail(experiment), length)  # over fewer than 32 images a mean says little
    seen, ends = np.unique(np.linspace(first, length - 1, most).astype(np.int64)), _window_ends(experiment, length)
    right = [[100.0 * np.cumsum(t.correct) / np.maximum(np.cumsum(t.known), 1) for t in each] for each in traces]
    same = [[(t.prediction == t.source)[t.source != UNKNOWN] for t in each] for each in traces]
    return {
        "seen": (seen + 1).tolist(),
        "ends": ends.tolist(),
        "accuracy": [_band([own[seen] for own in each]) for each in right] if experiment.labelled else [],
        "confidence": [_band([_window_percent(trace.confidence, ends) for trace in each]) for each in traces],
        "agreement": [_band([_window_percent(own, ends) for own in each if len(own) >= length]) for each in same],
    }


def _detail(experiment: Experiment) -> int:
    """Return how many points a curve may have."""
    return min(100, max(24, _CURVE_POINTS // (len(experiment.streams) * len(experiment.methods))))


def _window_ends(experiment: Experiment, length: int) -> Integers:
    """Return the ends of the windows, each of at least 16 images."""
    count = max(1, min(_detail(experiment) * 3 // 10, length // 16))
    return np.linspace(0, length, count + 1).astype(np.int64)[1:]


def _window_percent(values: NDArray[Any], ends: Integers) -> Floats:
    """Return the mean of each window in percent."""
    sums = np.concatenate([[0.0], np.cumsum(values[: ends[-1]].astype(np.float64))])[[0, *ends]]
    return np.asarray(100 * np.diff(sums) / np.diff([0, *ends]), dtype=np.float64)


def _band(lines: Sequence[Floats]) -> dict[str, list[float]] | None:
    """Return the mean over seeds, and the range where there are several; None where a figure is not known."""
    if not lines or not all(np.isfinite(line).all() for line in lines):
        return None
    stacked = np.stack(lines)
    band = {"mean": _drawn(stacked.mean(axis=0))}
    if len(lines) > 1:
        band |= {"low": _drawn(stacked.min(axis=0)), "high": _drawn(stacked.max(axis=0))}
    return band


def _drawn(values: Floats) -> list[float]:
    """Return percentages with two decimals that the script, which shows one, rounds to what the tables show."""
    figures = [(value, shown(value)) for value in values.tolist()]
    return [round(min(max(value, figure - 0.04), figure + 0.04), 2) for value, figure in figures]


def _balance(experiment: Experiment, stream: str) -> dict[str, Any]:
    """Return the share of each class over the stream, true and as predicted; of many classes some have a colour."""
    traces = {m: trace for m in experiment.methods if (trace := experiment.first(m, stream)) is not None}
    length = min(map(len, traces.values()), default=0)
    if not length:
        return {"ends": [], "classes": [], "truth": None, "methods": []}
    first, ends = next(iter(traces.values())), _window_ends(experiment, length)
    size = len(experiment.classes)
    predicted = np.stack([np.bincount(trace.prediction, minlength=size)[:size] for trace in traces.values()])
    frequent = predicted.mean(axis=0) + np.bincount(first.label[first.known], minlength=size)[:size]
    # The classes whose number differs most between the methods, of equals the most frequent.
    coloured = np.sort(np.lexsort((-frequent, -np.ptp(predicted, axis=0)))[:_FEW_CLASSES])
    return {
        "ends": ends.tolist(),
        "classes": coloured.tolist(),
        "truth": _shares(first.label, coloured, ends) if first.known.all() else None,
        "methods": [_shares(traces[m].prediction, coloured, ends) if m in traces else None for m in experiment.methods],
    }


def _shares(numbers: Integers, coloured: Integers, ends: Integers) -> list[list[float]]:
    """Return for each coloured class, and last for all others, its share of each window in percent."""
    parts = [_window_percent(numbers == number, ends) for number in coloured]
    return [np.round(part, 2).tolist() for part in (*parts, 100 - np.sum(parts, axis=0))]


def _counts(experiment: Experiment, method: str | None, stream: str) -> Integers:
    """Return how many images of each class (rows) were taken for each, over all seeds, where the true one is known."""
    size = len(experiment.classes)
    counts = np.zeros((size, size), dtype=np.int64)
    for trace in experiment.traces.get((method or "", stream), {}).values():
        named = trace[trace.known & (trace.prediction < size)]
        np.add.at(counts, (named.label, named.prediction), 1)
    return counts


def _confusion(counts: Integers) -> dict[str, Any] | None:
    """Return how often each class was taken for each: a matrix, or of many classes the commonest mistakes."""
    if not counts.any():
        return None
    if len(counts) <= _FEW_CLASSES:
        return {"counts": counts.tolist()}
    truth, taken = np.nonzero(counts * ~np.eye(len(counts), dtype=bool))
    mistakes = np.stack([truth, taken, counts[truth, taken]], axis=1)
    return {"mistakes": mistakes[np.argsort(-mistakes[:, 2], kind="stable")[:_LISTED]].tolist()}


def _by_class(experiment: Experiment, method: str, stream: str) -> list[dict[str, Any]]:
    """Return the accuracy on each class; of many classes those that changed most."""
    counts, by_source = (_counts(experiment, name, stream) for name in (method, experiment.reference))
    own, source = (100.0 * np.diag(c) / np.where(c.any(axis=1), c.sum(axis=1), np.nan) for c in (counts, by_source))
    present = np.flatnonzero(counts.any(axis=1))
    change = np.abs(np.nan_to_num(own - source))[present]
    kept = np.sort(present[np.argsort(-change, kind="stable")[:_LISTED]])
    return [
        _comparison(experiment, method, experiment.classes[k], own[k], source[k])
        | {"note": f"{counts[k].sum()} images"}
        for k in kept
    ]


def _by_domain(experiment: Experiment, method: str) -> list[dict[str, Any]]:
    """Return the accuracy on each domain, mean over seeds, also for streams that mix domains."""
    own, source = (_domain_accuracy(experiment, name) for name in (method, experiment.reference))
    return [_comparison(experiment, method, name, value, source.get(name, np.nan)) for name, value in own.items()]


def _domain_accuracy(experiment: Experiment, method: str | None) -> dict[str, float]:
    rows = [row for row in experiment.rows if row["label"] == method]
    inside = [
        row["by_domain"] if len(row.get("by_domain") or {}) > 1 else {row["stream"]: row.get("accuracy")}
        for row in rows
    ]
    return {str(name): value for name, value in frame(inside).astype(float).mean().dropna().items()}


def _comparison(experiment: Experiment, method: str, name: str, own: float, source: float) -> dict[str, Any]:
    """Return an accuracy beside the source model's; without one for the source model itself."""
    compared = method != experiment.reference and not np.isnan(source)
    before, gain = (shown(source), shown(own - source)) if compared else (None, None)
    return {"name": name, "after": shown(own), "before": before, "gain": gain}
