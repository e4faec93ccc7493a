"""Every registered method keeps every promise; a new one is tested the day it registers."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conformance.subjects import names, subject
from dpl.testing import CHECKS, Subject, caller_is_untouched, resumes_exactly, stays_finite

CUT, MORE = 3, 4

# One new interpreter continues all methods: starting one for each would take minutes.
CONTINUE = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
from conformance.subjects import subject
logits = {}
for snapshot in sorted(Path(sys.argv[3]).iterdir()):
    one = subject(snapshot.name)
    outputs = one.run(one.load(snapshot), steps=int(sys.argv[5]), start=int(sys.argv[4]))
    logits[snapshot.name] = torch.stack(outputs)
save_file(logits, sys.argv[6])
"""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", names())
def test_promise(name: str, check: Callable[[Subject], None]) -> None:
    check(subject(name))


@pytest.mark.parametrize("check", [stays_finite, resumes_exactly, caller_is_untouched], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", ["dpl", "dpl_dagger", "dpl_o", "tent", "pl", "shot_im+dpl", "t3a"])
@pytest.mark.parametrize("kind", ["group", "bottleneck", "weight_norm", "parametrized", "tokens", "late", "wrapped"])
def test_promise_on_other_networks(kind: str, name: str, check: Callable[[Subject], None]) -> None:
    check(subject(name, kind))


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Logits after a cut, of every method: never stopped, and continued by a new process from a snapshot."""
    folder = tmp_path_factory.mktemp("snapshots")
    straight = {}
    for name in names():
        one = subject(name)
        model = one.adapt()
        one.run(model, CUT)
        model.save(folder / "states" / name)
        straight[name] = torch.stack(one.run(model, MORE, start=CUT))
    tests, threads = str(Path(__file__).parents[1]), str(torch.get_num_threads())
    arguments = [tests, threads, str(folder / "states"), str(CUT), str(MORE), str(folder / "logits.safetensors")]
    done = subprocess.run([sys.executable, "-c", CONTINUE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return straight, load_file(folder / "logits.safetensors")


@pytest.mark.parametrize("name", names())
def test_continues_in_a_new_process(name: str, continued: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    straight, resumed = continued
    assert torch.equal(straight[name], resumed[name])
