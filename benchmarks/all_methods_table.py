"""Every method on four real streams: collect stored runs into one small file, and write docs/results/all_methods.md.

dpl bench configs/all_methods.yaml --data DATA --weights W --out RUNS
dpl bench configs/all_methods.yaml --data DATA --weights W --out TIMES \\
    --limit 64 --only seed=10 --only target=sketch
python benchmarks/all_methods_table.py collect --data DATA --weights W \\
    --store RUNS --times TIMES
python benchmarks/all_methods_table.py write
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from paired import by_label, difference, estimate, finished_runs

from dpl.bench.tables import over_seeds

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/results/data/all_methods.csv", ROOT / "docs/results/all_methods.md"
COLUMNS = ["section", "label", "column", "seed", "n", "accuracy", "norm", "output", "updates", "unit"]
STREAMS = {"art_painting": "PACS art", "sketch": "PACS sketch", "gaussian_noise": "noise", "fog": "fog"}
TEXT = """# All methods on four streams

Accuracy in percent, three seeds, with the half width of the 95 % interval (Student's t).
`difference` is to the source model on the same images (12 pairs, bootstrap). PACS: {pacs} images of
each target, batches of 32, EfficientNet-Lite0, 128 pixels. CIFAR-10: {cifar10} images, Gaussian noise
or fog, severity 5, batches of 200, ResNet-20. MEMO: {memo} images. FOA needs a ViT.

Settings are the authors'. Exceptions: on PACS many methods learn with 5e-5; on CIFAR-10 PL, SHOT
and the DPL family use batch statistics, affine parameters and 1e-3; RMT warms up on 640 images.
LAME assumes class-ordered streams. `time` is per image of PACS, one run of 64 images.

"""


def collect(args: argparse.Namespace) -> None:
    """Write one line for each finished run, and the time of each method relative to the source model's."""
    rows = finished_runs("all_methods", args.data, args.weights, args.store, COLUMNS)
    rows.merge(_times(args.times), on="label", how="left").to_csv(DATA, index=False)


def _times(store: Path) -> pd.DataFrame:
    """Return the time of an image on PACS for each row, relative to the source model's."""
    lines = []
    for done in (store / "units").glob("*/done"):
        unit = json.loads(done.with_name("unit.json").read_text())
        record = json.loads(done.with_name("results.jsonl").read_text().splitlines()[0])
        label = "dpl_carry_over" if unit["settings"].get("style") == "carry_over" else unit["method"]
        lines.append((label, record["seconds_per_image"]))
    seconds = pd.DataFrame(lines, columns=["label", "time"]).groupby("label")["time"].min()
    return (seconds / seconds["source"]).round(2).reset_index()


def write(rows: pd.DataFrame) -> str:
    """Return the page."""
    few = rows["section"].str.contains(" of ")
    sizes = {name: int(rows[rows["section"] == name]["n"].max()) for name in ("pacs", "cifar10")}
    memo = " and ".join(str(n) for n in rows[few].groupby("section", sort=False)["n"].max())
    head = TEXT.format(**{name: f"{size:,}" for name, size in sizes.items()}, memo=memo)
    lines = ["| method | " + " | ".join(STREAMS.values()) + " | mean | difference | time |", "|---|" + "---:|" * 7]
    table = pd.concat([_lines(rows[~few]), _lines(rows[few])])
    lines += table.sort_values("mean", ascending=False)["line"].tolist()
    commands = (__doc__ or "").split("\n\n", 1)[1].strip()
    return f"{head}" + "\n".join(lines) + f"\n\n*Measured 2026-11-18 with:*\n\n```\n{commands}\n```\n"


def _lines(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line of the table for each method, with its mean over the streams."""
    means, values = over_seeds(rows)[0]["average"], by_label(rows)
    lines = {}
    for label, part in rows.groupby("label", sort=False):
        shown = str(label).replace("dpl_carry_over", "dpl_dagger (carry_over)")
        cells = [_cell(part[part["column"] == stream]) for stream in STREAMS]
        against = "" if label == "source" else str(difference(values, str(label), "source"))
        time = part["time"].iloc[0]
        few = f" ({part['n'].min()} images)" if part["section"].str.contains(" of ").any() else ""
        lines[label] = f"| `{shown}`{few} | {' | '.join(cells)} | {means[label]:.1f} | {against} | {time:.1f} |"
    return pd.DataFrame({"mean": means, "line": pd.Series(lines)})


def _cell(rows: pd.DataFrame) -> str:
    found = estimate(rows.set_index(["column", "seed"])["accuracy"])
    return f"{found.mean:.1f} ± {found.high - found.mean:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect or write the table of all methods.")
    parser.add_argument("action", choices=("collect", "write"))
    for name in ("data", "weights", "store", "times"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    if args.action == "collect":
        collect(args)
    else:
        PAGE.write_text(write(pd.read_csv(DATA)), encoding="utf-8")


if __name__ == "__main__":
    main()
