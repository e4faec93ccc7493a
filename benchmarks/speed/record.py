"""What was measured so far, in a JSON file that is complete after every method."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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

    def add(self, row: Row) -> None:
        """Remember a row, at once."""
        self.rows.append(row)
        self.path.write_text(json.dumps(self.conditions | {"rows": self.rows}, indent=1))
