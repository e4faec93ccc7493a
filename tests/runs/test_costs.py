"""What adaptation costs, counted."""

import subprocess
import sys

import torch
from torch import nn

import dpl
from dpl.runs.costs import SAMPLE_EVERY, Work, environment


def count(step, images: int = 4) -> float:
    work = Work()
    for _ in range(2):  # the second batch is the first that is counted
        with work.counted(images):
            step()
    return 1e9 * work.gflops_per_image


def test_a_linear_layer_is_two_operations_for_each_weight() -> None:
    layer, images = nn.Linear(30, 20), torch.rand(4, 30)
    assert count(lambda: layer(images)) == 2 * 30 * 20


def test_backward_of_a_grouped_convolution_is_as_much_again_for_each_gradient() -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    images = torch.rand(4, 8, 6, 6, requires_grad=True)
    forward = 2 * 8 * 36 * 9
    assert count(lambda: layer(images)) == forward
    assert count(lambda: layer(images).sum().backward()) == 3 * forward
    fixed = images.detach()
    assert count(lambda: layer(fixed).sum().backward()) == 2 * forward


def test_counting_changes_no_output_and_counts_one_call_in_many() -> None:
    layer, images = nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)
    work, plain = Work(), layer(images)
    for _ in range(SAMPLE_EVERY):
        with work.counted(2):
            counted = layer(images)
        assert torch.equal(counted, plain)
    assert work._images == 2
    assert Work().gflops_per_image is None


def test_peak_memory_includes_freed_memory() -> None:
    """In a process of its own: here memory that other tests freed may be used again."""
    code = (
        "import torch; from dpl.runs.costs import forget_peak, peak_memory; forget_peak(); before = peak_memory();"
        "torch.ones(60_000_000).sum(); print(peak_memory() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) > 150e6


def test_the_environment_names_versions_and_threads() -> None:
    found = environment()
    assert found["dpl"] == dpl.__version__
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
