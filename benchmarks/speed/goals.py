"""Hold the JSON of the speed benchmark against what we ask of ourselves: python -m speed.goals FILE."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = dict[tuple[str, str], dict[str, Any]]
MOST_OF_FLOOR = {"dpl": 0.9, "pl": 0.9, "tent": 1.05}  # half of a batch confident
NETWORKS = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_lite0")


def main() -> None:
    """Print one line for each goal on each network: what was asked, what was reached."""
    found = json.loads(Path(sys.argv[1]).read_text())["rows"]
    rows: Rows = {(row["network"], row["method"]): row for row in found if "ours" in row}
    print("| goal | network | method | asked | reached | |\n| --- | --- | --- | ---: | ---: | --- |")
    for what, network, method, asked, value, at_least in goals(rows):
        held = value >= asked if at_least else value <= asked
        sign = "≥" if at_least else "≤"
        print(f"| {what} | {network} | `{method}` | {sign} {asked:g} | {value:.2f} | {'' if held else '**missed**'} |")


def goals(rows: Rows) -> Iterator[tuple[str, str, str, float, float, bool]]:
    """Yield each goal with its value and whether it is a lower bound."""
    for (network, method), row in rows.items():
        if network in NETWORKS and method in MOST_OF_FLOOR:
            yield "x floor", network, method, MOST_OF_FLOOR[method], row["ours"] / row["floor"], False
            yield "peak / usual's", network, method, 1.1, row["peak_ours"] / row["peak_usual"], False
        if method == "cotta":
            yield "usual / ours", network, method, 3, row["usual"] / row["ours"], True
        if method in ("t3a", "lame", "pl:classifier", "dpl:classifier"):
            yield "x source", network, method, 1.1, row["ours"] / row["source"], False
        if "dpl" in row:
            asked = 1.45 if method.endswith("carry_over") else 1.9
            yield "x dpl", network, method, asked, row["ours"] / row["dpl"], False
            yield "x dpl's floor", network, method, asked, row["ours"] / row["floor"], False
    for (network, method), row in rows.items():
        ratio = row.get("usual", row.get("plain")) / row["ours"]
        if ratio < 1:
            yield "usual / ours", network, method, 1, ratio, True


if __name__ == "__main__":
    main()
