"""The study of the default method: collect stored runs into one small file, and write docs/results/default.md from it.

dpl bench configs/soft_pacs.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_pairs.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_cifar.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_imagenet.yaml --data DATA --weights W --out RUNS
python benchmarks/default_study.py collect --data DATA --weights W --store RUNS
python benchmarks/default_study.py write
"""

import argparse
import textwrap
from pathlib import Path

import pandas as pd
from paired import by_label, difference, finished_runs

ROOT = Path(__file__).parents[1]
FILES = ("soft_pacs", "soft_pairs", "soft_cifar", "soft_imagenet")
DATA, PAGE = ROOT / "docs/results/data/default.csv", ROOT / "docs/results/default.md"
COLUMNS = ["section", "label", "column", "seed", "n", "accuracy", "confidence", "updates", "batches", "unit"]
DEFAULT, SOURCE = "dpl_soft", "source"
RIVALS = ("norm", "tent", "t3a", "shot_im", "eata", "roid", "dpl")
CHOSEN_ON = "pacs"  # streams on which the learning rate was chosen
SHUFFLED = ("pacs pairs", "shuffled", "other corruptions", "CIFAR-100", "mild", "imagenet")


def collect(data: Path, weights: Path, store: Path) -> None:
    """Write one line for each finished run; lines of earlier runs stay where the store has none.

    Remove the lines of a method that has changed first: they are those of its earlier form.
    """
    tables = [finished_runs(name, data, weights, store, COLUMNS) for name in FILES]
    lines = pd.concat([*tables, pd.read_csv(DATA)])
    lines.drop_duplicates(["section", "label", "column", "seed"]).to_csv(DATA, index=False)


def write(rows: pd.DataFrame) -> str:
    """Return the page."""
    values = by_label(rows)
    shuffled = values.loc[list(SHUFFLED)]
    parts = [
        "# The default method, measured",
        _summary(values, shuffled),
        "## Accuracy by stream, %",
        _accuracies(rows),
        "## Differences to `dpl_soft`, mixed streams",
        _differences(shuffled),
        "## The same on PACS with three source domains, where the learning rate was chosen",
        _differences(values.loc[[CHOSEN_ON]]),
        "## Every stream against the source model and the best rival",
        _by_stream(values),
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
    text = f"""*Measured 2026-11-18.* {units:,} runs, {images:,} images, 3 seeds. PACS: EfficientNet-Lite0, 128 pixels,
        batches of 32, the whole 80 % of each target, or 320 images of it (pairs). CIFAR-10, CIFAR-100: ResNet-20,
        ResNet-32, batches of 200, 1,000 images (400 in batches below 8), severity 5, mild ones 2.
        ImageNet: EfficientNet-Lite0, 224 pixels, 320 images, batches of 32, rivals with batch statistics and 5e-5.
        `matched SHOT-IM`, `soft loss alone`: one of the two losses. `1e-2`: soft_rates.yaml."""
    return _wrapped(text) + "\n\n```\n" + (__doc__ or "").split("\n\n", 1)[1].strip() + "\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect or write the study of the default method.")
    parser.add_argument("action", choices=("collect", "write"))
    for name in ("data", "weights", "store"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    if args.action == "collect":
        collect(args.data, args.weights, args.store)
    else:
        PAGE.write_text(write(pd.read_csv(DATA)), encoding="utf-8")


if __name__ == "__main__":
    main()
