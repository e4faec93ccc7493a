"""Write docs/results/claims.md, the ledger of the paper's claims, from stored benchmark runs.

python benchmarks/claims.py STORE [--compact docs/results/data/claims.json] [--keep docs/results/data/claims.json]
python benchmarks/claims.py docs/results/data/claims.json

The claims and the rows they compare are in claims.yaml; every number comes from the store, or from mechanism.csv.
"""

import argparse
import datetime
import itertools
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from paired import Difference, estimate

from dpl.bench.store import Store
from dpl.bench.unit import Unit, resolved_settings
from dpl.reproduce import paper

HERE = Path(__file__).parent
MECHANISM = HERE.parent / "docs/results/data/mechanism.csv"
FIELDS = ("dataset", "severities", "batch_size", "limit", "network", "protocol", "part")
VERDICTS = ("confirmed", "contradicted", "too small to see", "partly run", "not run")
UNITS = {
    "accuracy": "points", "last": "points in the last quarter", "ece": "points of ECE", "counts": "% of images",
    "separation": "% scatter between over within", "farther": "% of pairs above 50", "precision": "points of precision",
}  # fmt: skip
TARGETS = {"art_painting": "A", "cartoon": "C", "photo": "P", "sketch": "S"}
USUAL_RATE = "5e-5"
Found = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Row -> stream and seed -> measure -> value."""


# ---- What a run shows ----


def measures(record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], classes: int) -> dict[str, float]:
    """Return what a ledger can compare, of one finished unit."""
    label, prediction = arrays["label"].astype(int), arrays["prediction"].astype(int)
    confidence, right = arrays["confidence"].astype(float), label == prediction
    counts = [np.bincount(values, minlength=classes) for values in (label, prediction)]
    place, sure = np.arange(len(label)) / len(label), confidence > 0.9
    start, tail = place < 0.25, place >= 0.75
    found = {
        "accuracy": 100 * right.mean(),
        "last": 100 * right[tail].mean(),
        "ece": expected_calibration_error(confidence, right),
        "counts": 100 * np.abs(counts[0] - counts[1]).sum() / 2 / len(label),
        "confident": 100 * sure.mean(),
        "precision_first": 100 * right[start & sure].mean() if (start & sure).any() else np.nan,
        "precision": 100 * right[tail & sure].mean() if (tail & sure).any() else np.nan,
        "seconds": 1000 * record["seconds_per_image"],
    }
    if "surprise" in arrays:  # as the first runs have it
        found["nll"] = arrays["surprise"].astype(float).mean()
    elif "log_likelihood" in arrays:
        found["nll"] = -arrays["log_likelihood"].astype(float).mean()
    found |= {f"q{i}": 100 * part.mean() for i, part in enumerate(np.array_split(right, 4), 1)}
    return {name: round(float(value), 3) for name, value in found.items() if np.isfinite(value)}


def expected_calibration_error(confidence: NDArray[Any], right: NDArray[Any], bins: int = 15) -> float:
    """Return the mean gap between confidence and accuracy over equal bins of confidence, in points."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[place == b].sum() - right[place == b].sum()) for b in range(bins)]
    return 100 * float(sum(gaps)) / len(right)


def is_row(unit: Unit, wanted: Mapping[str, Any]) -> bool:
    """Say whether a unit is a run of this row: the given settings, all others at their defaults."""
    fields = {name: wanted[name] for name in FIELDS if name in wanted}
    own = {name: value for name, value in unit.record().items() if name in fields}
    if unit.method != wanted["method"] or own != fields:
        return False
    given = {key: value for key, value in wanted.items() if key not in (*FIELDS, "method")}
    full = json.loads(json.dumps(resolved_settings(unit.method, given)))  # lists for tuples, as units have them
    if "mixed_only" in full and "mixed_only" not in given:
        full["mixed_only"] = False  # the ledger tests the rule of the paper
    settings = unit.record()["settings"]
    return all(settings.get(key, value) == value for key, value in full.items() if key != "seed")


def wanted_rows(ledger: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a unit must be for each row: what its stream says, then its own settings."""
    return {
        label: ledger["defaults"][row["stream"]] | {key: value for key, value in row.items() if key != "stream"}
        for label, row in ledger["rows"].items()
        if "stream" in row
    }


def gather(store: Store, ledger: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the measures of every row."""
    rows = wanted_rows(ledger)
    found: dict[str, dict[str, dict[str, float]]] = {label: {} for label in ledger["rows"]}
    for unit in store.units():
        labels = [label for label, wanted in rows.items() if is_row(unit, wanted)]
        if unit.part == "outside":  # held-out images of the source, for a choice of settings only
            labels = [label for label in labels if rows[label].get("part") == "outside"]
        if labels:
            record = store.records(unit)[0]
            pair = f"{unit.trained_on[0]}>" if len(unit.trained_on) == 1 else ""
            stream = f"{unit.dataset} {pair}{','.join(unit.domains)} {unit.limit or 'all'}|{unit.seed}"
            values = measures(record, store.predictions(unit), len(record["classes"]))
            for label in labels:
                found[label][stream] = values
    return found


def add_mechanism(found: dict[str, dict[str, dict[str, float]]], lines: pd.DataFrame) -> None:
    """Add what benchmarks/mechanism.py measured."""
    for line in lines.itertuples():
        found.setdefault(line.row, {}).setdefault(f"{line.target}|{line.seed}", {})[line.measure] = line.value


# ---- Effects and verdicts ----


def table_of(found: Found, measure: str) -> pd.DataFrame:
    """Return one measure: a line for each stream and seed, a column for each row."""
    values = pd.DataFrame(
        {row: {stream: m[measure] for stream, m in streams.items() if measure in m} for row, streams in found.items()},
        dtype=float,
    ).sort_index()
    values.index = pd.MultiIndex.from_tuples([stream.rsplit("|", 1) for stream in values.index], names=["at", "seed"])
    return values


def effect_of(text: str, values: pd.DataFrame) -> Difference | None:
    """Return the effect that a sum of rows names, such as "dpl - pl"; None without pairs."""
    parts = re.split(r" ([+-]) ", f"_ + {text}")
    total = pd.Series(0.0, index=values.index)
    for sign, label in zip(parts[1::2], parts[2::2], strict=True):
        total = total + (1 if sign == "+" else -1) * values[label]
    pairs = total.dropna()
    return estimate(pairs) if len(pairs) > 1 else None


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


# ---- The page ----


def judged(claims: Iterable[Mapping[str, Any]], found: Found, margin: float) -> tuple[list[str], list[str], list[str]]:
    """Return the lines of the claims, the lines of their evidence, and the verdicts."""
    lines, evidence, verdicts = list[str](), list[str](), list[str]()
    for number, claim in enumerate(claims, 1):
        measure, expect = claim.get("measure", "accuracy"), claim.get("expect", "more")
        values = table_of(found, measure)
        effects = {text: effect_of(text, values) for text in claim.get("effects", [])}
        words = {text: verdict(effect, expect, margin) for text, effect in effects.items() if effect}
        verdicts.append(overall(list(words.values()), len(effects)))
        note = claim.get("note", claim.get("not_run", ""))
        lines.append(f"| {number} | {claim['claim']} | {verdicts[-1]} | {UNITS[measure]} | {note} |")
        for text, effect in effects.items():
            size = f"{effect} | {effect.pairs} | {effect.smallest:.1f} | {words[text]}" if effect else "not run | | |"
            evidence.append(f"| {number} | `{text}` | {size} |")
    return lines, evidence, verdicts


def printed_rows(
    found: Found, table: Mapping[str, float | None]
) -> Iterator[tuple[str, pd.Series, list[str], list[str]]]:
    """Yield each row that has runs, with its accuracies, its name and the paper's figure, and its calibration."""
    values = {name: table_of(found, name) for name in ("accuracy", "ece", "nll")}
    for row, printed in table.items():
        if len(found.get(row, {})) > 1:
            shown = "" if printed is None else f"{printed:.1f}"
            calibration = [f"{values['ece'][row].mean():.1f}", f"{values['nll'][row].mean():.2f}"]
            yield row, values["accuracy"][row].dropna(), [f"`{row}`", shown], calibration


def with_interval(values: pd.Series) -> str:
    """Return a mean that is no difference, with its interval."""
    ours = estimate(values)
    return f"{ours.mean:.1f} [{ours.low:.1f}, {ours.high:.1f}]"


def gain(values: pd.DataFrame, row: str, base: str) -> str:
    """Return the paired difference of a row to another one, nothing to itself or without pairs."""
    return "" if row == base else str(effect_of(f"{row} - {base}", values) or "")


def paper_table(found: Found, table: Mapping[str, float | None]) -> list[str]:
    """Return PACS by method: the paper's mean, ours with its interval, each target, and calibration."""
    values, lines = table_of(found, "accuracy"), list[str]()
    for row, accuracy, start, calibration in printed_rows(found, table):
        targets = accuracy.groupby(lambda key: key[0].split()[1]).mean()
        means = [f"{targets.get(name, np.nan):.1f}" for name in TARGETS]
        cells = [*start, with_interval(accuracy), gain(values, row, "source"), *means, *calibration]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def corruption_table(
    found: Found, rows: Mapping[str, Mapping[str, Any]], *, stream: str, column: str, against: list[str], runs: int
) -> list[str]:
    """Return corruptions by method: the paper's mean error, ours with its interval, differences, and calibration."""
    printed = paper.load("table4").cells
    figures = {row: printed.get((own["method"], column)) for row, own in rows.items() if own.get("stream") == stream}
    table = {row: figure and figure.value for row, figure in figures.items()}
    values, lines = table_of(found, "accuracy"), list[str]()
    for row, accuracy, start, calibration in printed_rows(found, table):
        gains = [gain(values, row, base) for base in against]
        count = f"{len(accuracy)}" if len(accuracy) == runs else f"{len(accuracy)} of {runs}"
        lines.append(f"| {' | '.join([*start, with_interval(100 - accuracy), *gains, *calibration, count])} |")
    return lines


def condition_table(found: Found, rows: Iterable[str]) -> list[str]:
    """Return by target how strong the source model is and what each method adds to it, overall and over the stream."""
    lines = []
    for name in TARGETS:
        accuracy, sure = (
            table[table.index.get_level_values(0) == f"pacs {name} all"]
            for table in (table_of(found, "accuracy"), table_of(found, "confident"))
        )
        gains = [gain(accuracy, row, "source") for row in rows]
        start = f"| {name} | {accuracy['source'].mean():.1f} | {sure['source'].mean():.0f}"
        lines.append(f"{start} | {' | '.join(gains)} |")
    return lines


def quarter_table(found: Found, rows: Iterable[str]) -> list[str]:
    """Return what each method adds to the source model in each quarter of the stream."""
    tables = [table_of(found, f"q{i}") for i in range(1, 5)]
    more = [table_of(found, name) for name in ("confident", "precision_first", "precision")]
    lines = []
    for row in rows:
        gains = [gain(table, row, "source") for table in tables]
        lines.append(f"| `{row}` | {' | '.join(gains)} | {' | '.join(f'{table[row].mean():.1f}' for table in more)} |")
    return lines


def chosen_rates(found: Found, method: str, rates: Iterable[str]) -> pd.DataFrame:
    """Return the accuracy on each pair of domains by learning rate, that of the chosen one, and that of the best.

    A rate is chosen for each source model by its accuracy on held-out images of the source domain; the first of equals.
    """
    values = table_of(found, "accuracy")
    labels = [method if rate == USUAL_RATE else f"{method} {rate}" for rate in rates]
    targets, held = (
        values[[f"{label} ({part})" for label in labels]].set_axis(list(rates), axis=1).dropna() for part in "PV"
    )
    of_model = {model_of(place): line.idxmax() for place, line in held.iterrows()}
    targets = targets[[model_of(place) in of_model for place in targets.index]]
    names = [of_model[model_of(place)] for place in targets.index]
    chosen = [targets.loc[place, name] for place, name in zip(targets.index, names, strict=True)]
    return targets.assign(name=names, chosen=chosen, best=targets.max(axis=1))


def model_of(place: tuple[str, str]) -> tuple[str, str]:
    """Return source domain and seed of a stream such as "pacs photo>sketch 320"."""
    return place[0].split(">")[0], place[1]


def selection_tables(found: Found, methods: Iterable[str], rates: list[str]) -> tuple[list[str], list[str]]:
    """Return what choosing the learning rate changes for each method, and how methods compare afterwards."""
    values, chosen, lines = table_of(found, "accuracy"), dict[str, pd.DataFrame](), list[str]()
    for method in methods:
        if not found.get(f"{method} {rates[0]} (P)"):
            continue
        table = chosen[method] = chosen_rates(found, method, rates)
        usual, source = table[USUAL_RATE], values["source (P)"].reindex(table.index)
        models = table["name"].groupby(model_of).first()
        cells = [f"{table[rate].mean():.1f}" for rate in rates] + [
            "/".join(str((models == rate).sum()) for rate in rates),
            *(str(estimate(table["chosen"] - other)) for other in (source, usual)),
            *(str(estimate(table["best"] - table[name])) for name in (USUAL_RATE, "chosen")),
            str(len(table)),
        ]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    against = []
    for one, other in itertools.combinations(chosen, 2):
        pairs = [(chosen[one][kind] - chosen[other][kind]).dropna() for kind in (USUAL_RATE, "chosen", "best")]
        against.append(f"| `{one}` minus `{other}` | {' | '.join(str(estimate(p)) for p in pairs)} | {len(pairs[0])} |")
    return lines, against


def setting_table(found: Found, rows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the mean accuracy of each row and its paired difference to the first of its group."""
    values = table_of(found, "accuracy")
    lines = []
    for base, others in rows.items():
        for row in (base, *others):
            if found.get(row):
                mean, count = values[row].mean(), values[row].count()
                lines.append(f"| `{row}` | {mean:.1f} | {gain(values, row, base)} | {count} |")
    return lines


def write_ledger(ledger: Mapping[str, Any], found: Found, origin: Mapping[str, str]) -> str:
    """Return the page."""
    found = {label: found.get(label, {}) for label in ledger["rows"]} | dict(found)
    claims, evidence, verdicts = judged(ledger["claims"], found, ledger["margin"])
    own, own_evidence, own_verdicts = judged(ledger.get("own", []), found, ledger["margin"])
    score = {word.replace(" ", "_"): verdicts.count(word) for word in VERDICTS}
    score |= {f"own_{word.replace(' ', '_')}": own_verdicts.count(word) for word in VERDICTS}
    page = (HERE / "claims_page.md").read_text().format(margin=ledger["margin"], **score, **origin)
    selection, against = selection_tables(found, **ledger["selection"]) if "selection" in ledger else ([], [])
    tables = {
        "SELECTION": selection, "SELECTED": against,
        "OWN_EVIDENCE": own_evidence, "OWN_CLAIMS": own, "CLAIMS": claims, "EVIDENCE": evidence,
        "TABLE1": paper_table(found, ledger.get("table1", {})),
        "TABLE4": [
            line for part in ledger.get("table4", []) for line in corruption_table(found, ledger["rows"], **part)
        ],
        "CONDITIONS": condition_table(found, ledger["compared"]) if "compared" in ledger else [],
        "QUARTERS": quarter_table(found, ledger["compared"]) if "compared" in ledger else [],
        "NOISE": setting_table(found, ledger.get("noise", {})),
        "SETTINGS": setting_table(found, ledger.get("settings", {})),
        "NETWORKS": setting_table(found, ledger.get("networks", {})),
    }  # fmt: skip
    for name, lines in tables.items():
        page = page.replace(f"\n{name}\n", "\n" + "\n".join(lines) + "\n")
    return page


def origin_of() -> dict[str, str]:
    """Return when and where the ledger was written."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, check=True)
    facts = {"command": "python benchmarks/claims.py STORE", "commit": commit.stdout.decode().strip()}
    return facts | {"date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, one thread"}


def write_compact(path: Path, kept: Mapping[str, str], found: Found) -> None:
    """Write the measures of each unit on a line of its own."""
    rows = [
        f"{json.dumps(row)}: {{\n" + ",\n".join(f"{json.dumps(s)}: {json.dumps(m)}" for s, m in sorted(units.items()))
        + "\n}" for row, units in found.items()
    ]  # fmt: skip
    head = json.dumps(kept, indent=0, sort_keys=True).rstrip("}\n")
    path.write_text(head + ',\n"rows": {\n' + ",\n".join(rows) + "\n}\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path, help="store of `dpl bench`, or a compact file written before")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/results/claims.md")
    parser.add_argument("--compact", type=Path, help="also write the measures of each unit, small enough to keep")
    parser.add_argument("--keep", type=Path, help="a compact file whose units stay where the store has none")
    options = parser.parse_args()
    ledger = yaml.safe_load((HERE / "claims.yaml").read_text())
    if options.store.is_file():
        kept = json.loads(options.store.read_text())
        found = kept.pop("rows")
    else:
        kept, found = origin_of(), gather(Store(options.store), ledger)
        add_mechanism(found, pd.read_csv(MECHANISM))
        earlier = json.loads(options.keep.read_text())["rows"] if options.keep else {}
        found = {row: {**earlier.get(row, {}), **units} for row, units in found.items()}
    if options.compact:
        write_compact(options.compact, kept, found)
    options.out.write_text(write_ledger(ledger, found, kept))


if __name__ == "__main__":
    main()
