"""Write docs/results/data/parity.json, from which docs/generate.py makes the table of agreement with other code.

DPL_PARITY_LOG=parity.json python -m pytest tests/parity && python benchmarks/parity_table.py parity.json
"""

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from parity.tiny import meta

ROOT = Path(__file__).parents[1]


def main(path: Path) -> None:
    runs = []
    for name, worst in sorted(json.loads(path.read_text()).items()):
        facts = meta(name)
        origin = f"{facts['source'].split('@')[0]} ({facts['method']})"
        runs.append({"name": name, "code": origin, "logits": worst["logits"], "state": worst.get("state")})
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    about = {
        "command": "DPL_PARITY_LOG=parity.json python -m pytest tests/parity",
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, torch {torch.__version__}",
    }
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
    target = ROOT / "docs" / "results" / "data" / "parity.json"
    target.write_text(f'{{\n{head} "runs": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
