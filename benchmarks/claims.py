"""Write docs/results/claims.md, the ledger of the paper's claims, from stored benchmark runs.

python benchmarks/claims.py STORE [--out docs/results/claims.md] [--compact FILE.json]

The claims and the rows they compare are in claims.yaml; every number comes from the store.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from paired import Difference, difference

from dpl.bench.store import Store
from dpl.bench.unit import Unit, resolved_settings

HERE = Path(__file__).parent
STREAM = ("domains", "severities", "limit", "order", "protocol", "seed", "weights")  # what pairs two runs
FIELDS = ("dataset", "batch_size", "limit")
VERDICTS = ("confirmed", "contradicted", "too small to see", "partly run", "not run")
UNITS = {"accuracy": "points", "ece": "points of ECE", "counts": "% of images", "seconds": "s an image"}


def measures(record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], classes: int) -> dict[str, float]:
    """Return what a ledger can compare, of one finished unit."""
    label, prediction = arrays["label"].astype(int), arrays["prediction"].astype(int)
    counts = [np.bincount(values, minlength=classes) for values in (label, prediction)]
    return {
        "accuracy": 100 * float((label == prediction).mean()),
        "ece": expected_calibration_error(arrays["confidence"].astype(float), label == prediction),
        "counts": 100 * float(np.abs(counts[0] - counts[1]).sum() / 2 / len(label)),
        "seconds": float(record["seconds_per_image"]),
    }


def expected_calibration_error(confidence: NDArray[Any], right: NDArray[Any], bins: int = 15) -> float:
    """Return the mean gap between confidence and accuracy over equal bins of confidence, in points."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[place == b].sum() - right[place == b].sum()) for b in range(bins)]
    return 100 * float(sum(gaps)) / len(right)


def is_row(unit: Unit, wanted: Mapping[str, Any]) -> bool:
    """Say whether a unit is a run of this row: the given settings, all others at their defaults."""
    if unit.method != wanted["method"] or any(getattr(unit, name) != wanted[name] for name in FIELDS):
        return False
    given = {key: value for key, value in wanted.items() if key not in (*FIELDS, "method")}
    full = resolved_settings(unit.method, given)
    return all(unit.settings.get(key, value) == value for key, value in full.items() if key != "seed")


def gather(store: Store, ledger: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the measures of every row: row -> stream -> measure -> value."""
    rows = {
        label: ledger["defaults"][row["stream"]] | {key: value for key, value in row.items() if key != "stream"}
        for label, row in ledger["rows"].items()
    }
    found: dict[str, dict[str, dict[str, float]]] = {label: {} for label in rows}
    for unit in store.units():
        for label in [label for label, wanted in rows.items() if is_row(unit, wanted)]:
            record = store.records(unit)[0]
            stream = "|".join(str(getattr(unit, name)) for name in STREAM)
            found[label][stream] = measures(record, store.predictions(unit), len(record["classes"]))
    return found


def effect_of(text: str, values: pd.DataFrame) -> Difference | None:
    """Return the effect that a sum of rows names, such as "dpl - pl"; None without pairs."""
    parts = re.split(r" ([+-]) ", f"_ + {text}")
    total = pd.Series(0.0, index=values.index)
    for sign, label in zip(parts[1::2], parts[2::2], strict=True):
        total = total + (1 if sign == "+" else -1) * values[label]
    pairs = pd.DataFrame({"effect": total, "zero": 0.0}).dropna()
    return difference(pairs, "effect", "zero") if len(pairs) > 1 else None


def verdict(effect: Difference, expect: str, margin: float) -> str:
    """Return what one effect says about its claim."""
    low, high = effect.low, effect.high
    confirmed, contradicted = {
        "more": (low > 0, high < 0),
        "same": (-margin < low and high < margin, low > margin or high < -margin),
        "not_more": (high < margin, low > margin),
    }[expect]
    return "confirmed" if confirmed else "contradicted" if contradicted else "too small to see"


def overall(verdicts: list[str], wanted: int) -> str:
    """Return the verdict on a claim with several effects: all must confirm it, one is enough against it."""
    for word in ("contradicted", "too small to see"):
        if word in verdicts:
            return word
    return "not run" if not verdicts else "confirmed" if len(verdicts) == wanted else "partly run"


def write_ledger(ledger: Mapping[str, Any], found: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Return the page."""
    claims, evidence, score = [], [], dict.fromkeys(VERDICTS, 0)
    for number, claim in enumerate(ledger["claims"], 1):
        measure, expect = claim.get("measure", "accuracy"), claim.get("expect", "more")
        values = pd.DataFrame(
            {row: {s: m[measure] for s, m in streams.items()} for row, streams in found.items()}
        ).sort_index()
        effects = {text: effect_of(text, values) for text in claim.get("effects", [])}
        words = {text: verdict(effect, expect, ledger["margin"]) for text, effect in effects.items() if effect}
        result = overall(list(words.values()), len(effects))
        score[result] += 1
        claims.append(f"| {number} | {claim['claim']} | {result} | {claim.get('not_run', UNITS[measure])} |")
        for text, effect in effects.items():
            size = f"{effect} | {effect.pairs} | {effect.smallest:.1f} | {words[text]}" if effect else "not run | | |"
            evidence.append(f"| {number} | `{text}` | {size} |")
    counted = {word.replace(" ", "_"): count for word, count in score.items()}
    page = (HERE / "claims_page.md").read_text().format(margin=ledger["margin"], **counted, **origin)
    return page.replace("CLAIMS", "\n".join(claims)).replace("EVIDENCE", "\n".join(evidence))


def origin_of() -> dict[str, str]:
    """Return when and where the ledger was written."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, check=True)
    facts = {"command": "python benchmarks/claims.py STORE", "commit": commit.stdout.decode().strip()}
    return facts | {"date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, one thread"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path, help="store of `dpl bench`, or a compact file written before")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/results/claims.md")
    parser.add_argument("--compact", type=Path, help="also write the measures of each unit, small enough to keep")
    options = parser.parse_args()
    ledger = yaml.safe_load((HERE / "claims.yaml").read_text())
    if options.store.is_file():
        kept = json.loads(options.store.read_text())
    else:
        kept = origin_of() | {"rows": gather(Store(options.store), ledger)}
    found = kept.pop("rows")
    if options.compact:
        options.compact.write_text(json.dumps(kept | {"rows": found}, indent=0, sort_keys=True) + "\n")
    options.out.write_text(write_ledger(ledger, found, kept))


if __name__ == "__main__":
    main()
