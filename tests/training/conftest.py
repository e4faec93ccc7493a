"""A tiny PACS that a tiny network learns within seconds."""

import pytest
import torch

from data.make import make_pacs
from dpl.training import TrainSpec


@pytest.fixture(scope="session")
def pacs(tmp_path_factory):
    return make_pacs(tmp_path_factory.mktemp("training_data"), per_class=10)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def spec():
    """Return a function that makes the settings of a quick run."""

    def make(**changed):
        quick = {"dataset": "PACS", "target": "sketch", "network": "debug_cnn", "size": 32, "steps": 7, "lr": 1e-2,
                 "per_domain": 8, "eval_every": 3}  # fmt: skip
        return TrainSpec(**(quick | changed))

    return make
