"""What was measured so far, in a JSON file that is complete after every method."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TIMES = ("source", "ours", "floor", "usual", "plain", "dpl")  # of a row, in milliseconds for each image


class Record:
    """Rows of one benchmark; those of an earlier, interrupted run with the same conditions are taken over."""

    def __init__(self, path: Path, conditions: Row) -> None:
        self.path, self.conditions = path, conditions
        before = json.loads(path.read_text()) if path.exists() else {}
        same = {key: value for key, value in before.items() if key != "rows"} == conditions
        self.rows: list[Row] = before["rows"] if same else []

    def find(self, network: str, method: str) -> Row | None:
        """Return what is known of a method on a network."""
        return next((row for row in self.rows if (row["network"], row["method"]) == (network, method)), None)

    def add(self, row: Row) -> Row:
        """Remember a row, at once; of what is known already, the better times count, and rounds add up. Return both."""
        before = self.find(row["network"], row["method"])
        if before is None:
            self.rows.append(row)
        else:
            better = {key: min(row[key], before[key]) for key in TIMES if key in row and key in before}
            rounds = {"rounds": before["rounds"] + row["rounds"]} if better else {}  # else it cannot be run
            row = before | better | rounds
            self.rows[self.rows.index(before)] = row
        self.path.write_text(json.dumps(self.conditions | {"rows": self.rows}, indent=1))
        return row
