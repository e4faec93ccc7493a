"""Write the largest differences of a session to the file that DPL_PARITY_LOG names, for benchmarks/parity_table.py."""

import json
import os
from pathlib import Path

import pytest

from parity.tiny import MEASURED


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := os.environ.get("DPL_PARITY_LOG"):
        Path(path).write_text(json.dumps(MEASURED, indent=2, sort_keys=True))
