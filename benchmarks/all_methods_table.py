"""Print the table of docs/results/all_methods.md from a store of configs/all_methods.yaml.

dpl bench configs/all_methods.yaml --data DATA --weights WEIGHTS --out RUNS
python benchmarks/all_methods_table.py RUNS
"""

import json
import sys
from pathlib import Path
from typing import Any

DATA = ("pacs", "cifar10")


def read(store: Path) -> dict[str, dict[str, Any]]:
    """Return label -> data set -> record of every finished run."""
    rows: dict[str, dict[str, Any]] = {}
    for folder in (store / "units").iterdir():
        if (folder / "done").exists():
            unit = json.loads((folder / "unit.json").read_text())
            record = json.loads((folder / "results.jsonl").read_text().splitlines()[0])
            carried = unit["settings"].get("style") == "carry_over"
            label = f"{unit['method']} (carry_over)" if carried else unit["method"]
            rows.setdefault(label, {})[unit["dataset"]] = record
    return rows


def main(store: Path) -> None:
    rows = read(store)
    print("| method | norm | output | PACS sketch % | time | CIFAR-10 Gaussian noise % | time |")
    print("|---|---|---|---|---|---|---|")
    source = rows["source"]
    for label in sorted(rows, key=lambda label: -rows[label]["pacs"]["accuracy"]):
        cells = []
        for data in DATA:
            record = rows[label].get(data)
            ratio = None if record is None else record["seconds_per_image"] / source[data]["seconds_per_image"]
            cells += ["-", "-"] if record is None else [f"{record['accuracy']:.1f}", f"{ratio:.1f}x"]
        norms = " / ".join(dict.fromkeys(str(rows[label][data]["norm"]) for data in DATA if data in rows[label]))
        print(f"| {label} | {norms} | {rows[label]['pacs']['output']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
