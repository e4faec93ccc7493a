"""Small finished runs for the tests of the report page."""

import pytest
import torch

from report.runs import make_adapted, make_store


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def bench_root(tmp_path_factory):
    """A finished benchmark: `store`, `data`, `weights`, `tiny.yaml`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("bench_root")
    make_store(root)
    torch.set_num_threads(threads)
    return root


@pytest.fixture(scope="session")
def adapted(tmp_path_factory):
    """A predictions file of a flat folder, with the source's answers, some of which adaptation changed."""
    return make_adapted(tmp_path_factory.mktemp("adapted"), "--with-source", "--set", "lr=0.03", "--no-guard")
