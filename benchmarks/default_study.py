"""The study of the default method: collect stored runs into one small file, and write docs/results/default.md from it.

dpl bench configs/soft_pacs.yaml --data DATA --weights W --out RUNS
dpl bench configs/soft_cifar.yaml --data DATA --weights W --out RUNS
python benchmarks/default_study.py collect --data DATA --weights W --store RUNS
python benchmarks/default_study.py write
"""

import argparse
import textwrap
from pathlib import Path

import pandas as pd
from paired import by_label, difference, finished_runs

ROOT = Path(__file__).parents[1]
FILES = ("soft_pacs", "soft_cifar")
DATA, PAGE = ROOT / "docs/results/data/default.csv", ROOT / "docs/results/default.md"
COLUMNS = ["section", "label", "column", "seed", "n", "accuracy", "confidence", "updates", "batches", "unit"]
DEFAULT, SOURCE = "dpl_soft", "source"
RIVALS = ("norm", "tent", "t3a", "shot_im", "eata", "roid", "dpl")
SHUFFLED = ("pacs", "shuffled")


def collect(data: Path, weights: Path, store: Path) -> None:
    """Write one line for each finished run; lines of earlier runs stay where the store has none."""
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
        _differences(shuffled, [label for label in values if label != DEFAULT]),
        "## Every stream against the source model and the best rival",
        _by_stream(values),
        "## How it was measured",
        _protocol(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(values: pd.DataFrame, shuffled: pd.DataFrame) -> str:
    rivals = [label for label in RIVALS if label in values and shuffled[label].notna().all()]
    best = shuffled[rivals].mean().idxmax()
    gain = difference(shuffled, DEFAULT, best)
    worst = _stream_means(values).eval(f"{DEFAULT} - {SOURCE}")
    pacs = values.loc[["pacs"]]
    text = f"""On {len(_stream_means(shuffled))} mixed streams `{DEFAULT}` has {shuffled[DEFAULT].mean():.1f} %,
        the source model {shuffled[SOURCE].mean():.1f} %, and the best single rival, `{best}`,
        {shuffled[best].mean():.1f} %. The paired difference to it is {gain} points (95 % interval, {gain.pairs} pairs).
        On PACS alone: {difference(pacs, DEFAULT, SOURCE)} to the source model, {difference(pacs, DEFAULT, "dpl")} to
        `dpl`. The worst stream is {-worst.min():.1f} points below the source model ({worst.idxmin()[1]},
        class-ordered)."""
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


def _differences(values: pd.DataFrame, labels: list[str]) -> str:
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
    text = f"""*Measured 2026-11-18 by `benchmarks/default_study.py`.* {units} runs, {images:,} images, 3 seeds.
        PACS: EfficientNet-Lite0, 128 pixels, batches of 32, the whole 80 % of each target. CIFAR-10: ResNet-20, batches
        of 200, 1,000 images with regenerated corruptions, severity 5. Bootstrap over streams, then seeds.
        `matched SHOT-IM` (another loss) and
        `higher rate` learn with 2e-4. The default, 5e-5, was chosen on PACS."""
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
