"""Print the parity table of docs/methods.md.

DPL_PARITY_LOG=parity.json python -m pytest tests/parity && python benchmarks/parity_table.py parity.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from parity.tiny import meta


def main(path: Path) -> None:
    print("| trace | whose code | logits | state after the first batch |\n|---|---|---|---|")
    for name, worst in sorted(json.loads(path.read_text()).items()):
        facts = meta(name)
        origin = f"{facts['source'].split('@')[0]} ({facts['method']})"
        print(f"| {name} | {origin} | {worst['logits']:.0e} | {worst['state']:.0e} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
