"""The study of the default method: collect stored runs into one small file, and write docs/results/default.md from it.

dpl bench configs/soft_pacs.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_pairs.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_cifar.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_imagenet.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_settings.yaml --data DATA --weights W --out RUNS
python benchmarks/default_study.py guard --data DATA --weights W --store RUNS
python benchmarks/digits_study.py --store RUNS
python benchmarks/default_study.py collect --data DATA --weights W --store RUNS
python benchmarks/default_study.py write

`guard` runs `dpl_soft` on these streams again, as `dpl.adapt(network)` does: under the guard.
"""

import argparse
import logging
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch
from paired import by_label, difference, finished_runs

import dpl
from dpl.bench import Store, read_grid
from dpl.bench.context import BenchContext
from dpl.bench.images import UnitStream
from dpl.bench.run import run_unit
from dpl.bench.section import SHIPPED

ROOT = Path(__file__).parents[1]
FILES = ("soft_pacs", "soft_pairs", "soft_cifar", "soft_imagenet", "soft_settings")
DATA, PAGE = ROOT / "docs/results/data/default.csv", ROOT / "docs/results/default.md"
COLUMNS = ["section", "label", "column", "seed", "n", "accuracy", "confidence", "updates", "batches", "unit"]
KEY = COLUMNS[:4]
DEFAULT, SOURCE, GUARDED = "dpl_soft", "source", "default"
RIVALS = ("norm", "tent", "t3a", "shot_im", "eata", "roid", "rotta", "dpl")
CHOSEN_ON = "pacs"  # streams on which the learning rate was chosen
SHUFFLED = ("pacs pairs", "shuffled", "other corruptions", "CIFAR-100", "mild", "imagenet")
LONG = ("recurring", "recurring, the last", "ten passes", "ten passes, the last")
ORDERED = (
    "sorted by class", "Dirichlet 0.1", "class-ordered (200)", "class-ordered (32)", "class-ordered (8)", *LONG
)  # fmt: skip
DIGITS = ("digits", "digits GroupNorm", "digits ViT")
SETTINGS = ("settings (200)", "settings (8)")

PROTOCOL = """| streams | network | images |
|---|---|---|
| PACS | EfficientNet-Lite0, 128 pixels | the whole 80 % of each target, 320 of it (pairs); batches of 32 |
| CIFAR-10, CIFAR-100 | ResNet-20, ResNet-32 | 1,000, 400 in batches below 8; severity 5, mild ones 2; batches of 200 |
| class-ordered (200), (32), (8) | ResNet-20 | 2,000, 1,000 and 1,000, in batches of so many |
| recurring, ten passes | ResNet-20 | 400 of fog and of pixelate in turns, ten times; 600 of fog, ten times |
| ImageNet | EfficientNet-Lite0, 224 pixels | 320; batches of 32; rivals with batch statistics and 5e-5 |
| digits | that of `dpl demo`, three orders | 1,797; batches of 32; `pl`, `dpl`, `shot_im` with 1e-4 |
| digits ViT | two blocks of width 64 trained on MNIST, one for each seed | the same |
| not run | | ten passes of pixelate; the guard on ImageNet, on PACS with three sources and on sequences of domains |
| not run | GroupNorm on digits; `dpl demo`'s network on class-ordered digits | |

| row | what it is |
|---|---|
| `matched SHOT-IM`, `matched TENT`, `soft loss alone` | `dpl_soft` with one of the losses |
| `1e-2` | this learning rate, chosen with soft_rates.yaml |
| `default` | `dpl_soft` under the guard, as `dpl.adapt(network)` runs it |"""


class Guarded(BenchContext):
    """Makes the model that `dpl.adapt(network)` makes, whatever the unit's method is."""

    def prepared(self, stream: UnitStream) -> dpl.AdaptiveModel:
        network = self.source_network(stream.unit, len(stream.parts[0].images.classes))
        torch.manual_seed(stream.unit.seed)
        return dpl.adapt(network)


def guard(data: Path, weights: Path, store: Path, file: str) -> None:
    """Run the default under the guard on every stream of an experiment file that is not done."""
    logging.disable(logging.WARNING)
    grid = read_grid(SHIPPED / f"{file}.yaml", BenchContext(data, weights, SHIPPED))
    context, done = Guarded(data, files=grid.files, cache=store / "corrupted"), Store(store / "guard")
    for unit in (cell.candidates[0].target for cell in grid.cells if cell.label == DEFAULT):
        if not done.done(unit):
            done.commit(unit, run_unit(unit, context))
            print(unit.title, flush=True)


def collect(data: Path, weights: Path, store: Path, files: Iterable[str]) -> None:
    """Write one line for each finished run; lines of earlier runs stay where the store has none.

    Remove the lines of a method that has changed first: they are those of its earlier form.
    """
    columns, digits, kept = [*COLUMNS, "visit"], store / "digits.jsonl", pd.read_csv(DATA)
    new = [
        _by_visit(finished_runs(name, data, weights, place, columns).replace({"label": {DEFAULT: label}}))
        for place, label in ((store, DEFAULT), (store / "guard", GUARDED))
        for name in files
    ]
    if digits.is_file():
        new.append(pd.read_json(digits, lines=True).round({"accuracy": 4}))
    places = pd.concat([kept, *new])[KEY].drop_duplicates()  # old lines keep theirs
    lines = pd.concat([*new, kept])[COLUMNS].drop_duplicates(KEY)
    places.merge(lines, on=KEY).astype(dict.fromkeys(["seed", "n", "updates", "batches"], int)).to_csv(
        DATA, index=False
    )


def _by_visit(lines: pd.DataFrame) -> pd.DataFrame:
    """Return recurring streams twice, the mean of all visits and the last one; other lines as they are."""
    lines = lines.assign(section=lines["section"].astype(str).str.replace(r"^(ten passes) .*", r"\1", regex=True))
    last = lines["visit"] == lines.groupby(KEY)["visit"].transform("max")
    again = lines[last & (lines["visit"] > 0)]
    how = {"n": "sum", "accuracy": "mean", "confidence": "mean", "updates": "sum", "batches": "sum", "unit": "first"}
    whole = lines.groupby(KEY, sort=False).agg(how).reset_index().round({"accuracy": 4, "confidence": 4})
    return pd.concat([whole, again.assign(section=again["section"] + ", the last")])


def write(rows: pd.DataFrame) -> str:
    """Return the page."""
    values = by_label(rows)
    shuffled = values.loc[list(SHUFFLED)]
    ordered, digits, varied = (rows["section"].isin(names) for names in (ORDERED, DIGITS, SETTINGS))
    parts = [
        "# The default method, measured",
        _summary(values, shuffled),
        "## Accuracy by stream, %",
        _accuracies(rows[~ordered & ~digits & ~varied]),
        "## Class-ordered, recurring and long streams, %",
        _accuracies(rows[ordered]),
        _gains(values, ORDERED),
        "## Digits, %",
        "Networks trained on MNIST, streams of UCI digits.",
        *_digits(_by_column(rows[digits])),
        "## Differences to `dpl_soft`, mixed streams",
        _differences(shuffled),
        "## The same on PACS with three source domains, where the learning rate was chosen",
        _differences(values.loc[[CHOSEN_ON]]),
        "## One setting changed",
        *_settings(rows[varied]),
        "## Every stream against the source model and the best rival",
        _by_stream(values.drop(list(SETTINGS), level=0, errors="ignore")),
        "## How it was measured",
        _protocol(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(values: pd.DataFrame, shuffled: pd.DataFrame) -> str:
    complete = [label for label in RIVALS if label in values and shuffled[label].notna().all()]
    best = shuffled[complete].mean().idxmax()
    gain, means = difference(shuffled, DEFAULT, best), _stream_means(values)
    worst = (means[DEFAULT] - means[SOURCE]).sort_values()
    text = f"""On {len(means.loc[list(SHUFFLED)])} mixed streams that no setting was chosen on, `{DEFAULT}` has
        {shuffled[DEFAULT].mean():.1f} %, the source model {shuffled[SOURCE].mean():.1f} %, the best single rival,
        `{best}`, {shuffled[best].mean():.1f} %: {gain} points (95 % interval, {gain.pairs} pairs). The worst stream is
        {-worst.iloc[0]:.1f} points below the source model ({worst.index[0][0]}: {worst.index[0][1]})."""
    return _wrapped(text)


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100)


def _stream_means(values: pd.DataFrame) -> pd.DataFrame:
    return values.groupby(["section", "column"], sort=False).mean()


def _accuracies(rows: pd.DataFrame) -> str:
    means = rows.groupby(["label", "section"], sort=False)["accuracy"].mean().unstack()
    lines = ["| row | " + " | ".join(means) + " |", "|---|" + "---:|" * len(means.columns)]
    for label, line in means.iterrows():
        lines.append(f"| `{label}` | " + " | ".join("" if pd.isna(v) else f"{v:.1f}" for v in line) + " |")
    return "\n".join(lines)


def _differences(values: pd.DataFrame) -> str:
    labels = [label for label in values if label != DEFAULT and values[label].notna().any()]
    lines = ["| row | `dpl_soft` minus row | pairs | smallest effect likely to be seen |", "|---|---|---:|---:|"]
    for label in labels:
        found = difference(values, DEFAULT, label)
        lines.append(f"| `{label}` | {found} | {found.pairs} | {found.smallest:.1f} |")
    return "\n".join(lines)


def _digits(rows: pd.DataFrame) -> list[str]:
    return [_accuracies(rows), _gains(by_label(rows), tuple(dict.fromkeys(rows["section"])))] if len(rows) else []


def _settings(rows: pd.DataFrame) -> list[str]:
    """Return the accuracy with one setting changed, and its difference to the defaults, by batch size."""
    if not len(rows):
        return []
    values, sections = by_label(rows), list(dict.fromkeys(rows["section"]))
    lines = ["| row | " + " | ".join(f"{name}, % | minus default" for name in sections) + " |"]
    lines.append("|---|" + "---:|---|" * len(sections))
    for label in values:
        cells = [f"`{label}`"]
        for part in (values.loc[[section]] for section in sections):
            beside = str(difference(part, label, DEFAULT)) if label != DEFAULT else ""
            cells += [f"{part[label].mean():.1f}", beside]
        lines.append("| " + " | ".join(cells) + " |")
    about = """CIFAR-10, ResNet-20, shot noise, defocus blur, fog and pixelate in batches of 200; fog and pixelate in
        batches of 8."""
    return [_wrapped(about), "\n".join(lines)]


def _by_column(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a section for each stream."""
    return rows.assign(section=rows["section"] + ": " + rows["column"])


def _gains(values: pd.DataFrame, sections: tuple[str, ...]) -> str:
    """Return paired differences for each section."""
    pairs = [(DEFAULT, SOURCE), (GUARDED, SOURCE), (GUARDED, DEFAULT)]
    lines = [
        "| streams | "
        + " | ".join(f"`{a}` minus `{b}`" for a, b in pairs)
        + " | `dpl_soft` minus the best rival | pairs |"
    ]
    lines.append("|---|---|---|---|---|---:|")
    for section in (name for name in sections if name in values.index.get_level_values(0)):
        part = values.loc[[section]]
        found = [difference(part, a, b) if a in part and part[a].notna().any() else "" for a, b in pairs]
        best = part[[label for label in RIVALS if label in part]].mean().idxmax()
        beside = difference(part, DEFAULT, best)
        cells = [section, *map(str, found), f"{beside} (`{best}`)", str(beside.pairs)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_stream(values: pd.DataFrame) -> str:
    means, rivals = _stream_means(values), [label for label in RIVALS if label in values]
    lines = ["| stream | source | best rival | `dpl_soft` |", "|---|---:|---:|---:|"]
    for (section, column), line in means.iterrows():
        best = line[rivals].idxmax()
        lines.append(
            f"| {section}: {column} | {line[SOURCE]:.1f} | {line[best]:.1f} (`{best}`) | {line[DEFAULT]:.1f} |"
        )
    return "\n".join(lines)


def _protocol(rows: pd.DataFrame) -> str:
    units, images = len(rows), int(rows["n"].sum())
    measured = """*Measured 2026-11-18; in class order, in sequences and under the guard 2026-11-19. Mixed streams were
        measured before batches were looked at by themselves. Twelve runs on PACS were repeated with it: eleven are
        equal, one is 0.9 points better.*"""
    return (
        f"{_wrapped(measured)}\n"
        f"{units:,} lines, {images:,} images, 3 seeds.\n\n"
        f"{PROTOCOL}\n\n```\n{(__doc__ or '').split(chr(10) * 2, 2)[1].strip()}\n```"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect or write the study of the default method.")
    parser.add_argument("action", choices=("guard", "collect", "write"))
    for name in ("data", "weights", "store"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--files", nargs="*", default=FILES, help="experiment files, if not all")
    args = parser.parse_args()
    if args.action == "guard":
        for file in args.files:
            guard(args.data, args.weights, args.store, file)
    elif args.action == "collect":
        collect(args.data, args.weights, args.store, args.files)
    else:
        PAGE.write_text(write(pd.read_csv(DATA)), encoding="utf-8")


if __name__ == "__main__":
    main()
