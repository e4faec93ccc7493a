"""Signs of trouble that predictions show: who collapses, who ends below the source, who skips updates."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from dpl.report.model import UNKNOWN, Experiment, Track, paired

__all__ = ["Sign", "signs", "skipped"]

_BELOW = 1.0  # points of accuracy under the source that are worth a word
_FALL = 5.0  # points of accuracy lost against the source between the first and the last third
_CROWDED = 2.0  # times its share among the true (or the source's) classes
_CROWD = 0.4  # share of one class in the last third of a stream that looks like a collapse


@dataclass(frozen=True)
class Sign:
    """One remark on a method."""

    method: str
    stream: str
    text: str
    short: str


def signs(experiment: Experiment) -> list[Sign]:
    """Return what is remarkable, method by method; the first seed speaks for all."""
    found = []
    for method in experiment.methods:
        for stream in experiment.streams:
            tracks = experiment.tracks.get((method, stream), ())
            if tracks and method != experiment.reference:
                found += [Sign(method, stream, *remark) for remark in _remarks(experiment, stream, tracks[0])]
    unreadable: Counter[tuple[str, str]] = Counter()
    for row in experiment.rows:
        unreadable[row["label"], row["stream"]] += row.get("unreadable") or 0
    lost = {key: count for key, count in unreadable.items() if count}
    return found + [Sign(m, s, f"{n:,} images could not be read", f"{n:,} unreadable") for (m, s), n in lost.items()]


def _remarks(experiment: Experiment, stream: str, track: Track) -> list[tuple[str, str]]:
    others = experiment.tracks.get((experiment.reference or "", stream), ())
    source = next((other for other in others if other.seed == track.seed), None)
    if source is not None:
        source, track = paired(source, track)
    if len(track) < 3:
        return []
    remarks = _collapse(experiment, track, source)
    if source is not None and bool((track.label != UNKNOWN).all()):
        gain = 100.0 * (track.correct.astype(float) - source.correct)
        first, last = (float(gain[part].mean()) for part in (_first(len(gain)), _last(len(gain))))
        end = float(gain.mean())
        if end < -_BELOW:
            remarks.append((f"ends {-end:.1f} points below the source", f"−{-end:.1f}"))
        if last < first - _FALL and last < 0:
            words = f"{first:+.1f} points against the source in the first third, {last:+.1f} in the last"
            remarks.append((f"falls behind: {words}", "falling"))
    return remarks


def _collapse(experiment: Experiment, track: Track, source: Track | None) -> list[tuple[str, str]]:
    """Say whether one class takes far more of the last third than it should."""
    rows, count = _last(len(track)), len(experiment.classes)
    answers = np.bincount(track.prediction[rows], minlength=count)
    top = int(answers.argmax())
    share = float(answers[top] / answers.sum())
    known = track.label[rows]
    expected = known if bool((known != UNKNOWN).all()) else source.prediction[rows] if source is not None else None
    if expected is None or share < _CROWD:
        return []
    usual = float((expected == top).mean())
    if share < _CROWDED * usual:
        return []
    name = experiment.classes[top] if top < count else f"class {top}"
    return [(f"answers {name} for {share:.0%} of the last third; {usual:.0%} would be expected", f"{share:.0%} {name}")]


def _first(length: int) -> slice:
    return slice(0, length // 3)


def _last(length: int) -> slice:
    return slice(length - length // 3, length)


def skipped(experiment: Experiment) -> list[tuple[str, int, int, str]]:
    """Return method, skipped batches, all batches and the commonest reason, of methods that skipped some."""
    found = []
    for method in experiment.methods:
        rows = experiment.of(method)
        batches = sum(row.get("batches") or 0 for row in rows)
        missed = sum(row.get("skipped") or 0 for row in rows)
        reasons: Counter[str] = Counter()
        for row in rows:
            reasons.update(row.get("skipped_because") or {})
        if missed and any(row.get("trainable_values") for row in rows):
            found.append((method, missed, batches, reasons.most_common(1)[0][0] if reasons else "not recorded"))
    return found
