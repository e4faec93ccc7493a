"""Turn the JSON files of the speed benchmark into Markdown: python -m speed.table FILE..."""

import json
import sys
from pathlib import Path
from typing import Any

HEAD = (
    "| method | images/s | x source | x floor | usual / ours | peak MB | usual's |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Print one table for each network in the files."""
    for name in sys.argv[1:]:
        found = json.loads(Path(name).read_text())
        for network in dict.fromkeys(row["network"] for row in found["rows"]):
            rows = [row for row in found["rows"] if row["network"] == network and "ours" in row]
            size, batch = rows[0]["size"], rows[0]["batch"]
            print(
                f"\n**{network}**, {size} pixels, batch {batch}, {found['threads']} threads ({found['clock']} time)\n"
            )
            print(HEAD)
            for row in rows:
                print(line(row))


def line(row: dict[str, Any]) -> str:
    """Return one method as a row of the table."""
    other = "usual" if "usual" in row else "plain"
    ratio = f"{row[other] / row['ours']:.2f}" + ("\\*" if other == "plain" else "")
    floor = f"{row['ours'] / row['floor']:.2f}" if "floor" in row else "–"
    cells = [
        f"`{row['method']}`", f"{1e3 / row['ours']:.1f}", f"{row['ours'] / row['source']:.2f}", floor, ratio,
        f"{row['peak_ours']:.0f}", f"{row[f'peak_{other}']:.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
