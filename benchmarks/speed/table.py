"""Turn the JSON files of the speed benchmark into Markdown: python -m speed.table FILE... [--methods NAME ...]."""

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = (
    "| method | images/s | x source | x floor | usual / ours | peak MB | usual's | rounds |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


NAMES = {
    "resnet20": "CIFAR ResNet-20",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "mobilenet_v2": "MobileNetV2",
    "vit_small": "ViT-S/16",
}


def main() -> None:
    """Print one table for each network in the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--methods", nargs="+", help="these alone, in this order")
    args = parser.parse_args()
    for path in args.files:
        found = [row for row in json.loads(path.read_text())["rows"] if "ours" in row]
        for network in dict.fromkeys(row["network"] for row in found):
            rows = {row["method"]: row for row in found if row["network"] == network}
            chosen = [rows[name] for name in args.methods or sorted(rows) if name in rows]
            print(f"\n{NAMES[network]} ({chosen[0]['size']} pixels, batch {chosen[0]['batch']}):\n\n{HEAD}")
            print("\n".join(map(line, chosen)))


def line(row: dict[str, Any]) -> str:
    """Return one method as a row of the table."""
    other = "usual" if "usual" in row else "plain"
    ratio = f"{row[other] / row['ours']:.2f}" + ("\\*" if other == "plain" else "")
    floor = f"{row['ours'] / row['floor']:.2f}" if "floor" in row else "–"
    cells = [
        f"`{row['method']}`", f"{1e3 / row['ours']:.1f}", f"{row['ours'] / row['source']:.2f}", floor, ratio,
        f"{row['peak_ours']:.0f}", f"{row[f'peak_{other}']:.0f}", f"{row['rounds']}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
