"""Makes `from data.make import ...` work in the tests of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
