"""Makes `from data.make import ...` work here, and gives the tests tiny data sets, networks and experiment files."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tiny import make_everything


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The number of threads is part of a record."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def everything(tmp_path_factory) -> Path:
    """A folder with all eight layouts, and weights for each."""
    return make_everything(tmp_path_factory.mktemp("everything"))
