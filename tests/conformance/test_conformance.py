"""Every registered method keeps every promise; a new one is tested the day it registers."""

import pytest
import torch

from conformance.subjects import names, subject
from dpl.testing import CHECKS, continue_in_new_process


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", names())
def test_promise(name: str, check) -> None:
    check(subject(name))


@pytest.mark.parametrize("name", names())
def test_continues_in_a_new_process(name: str, tmp_path, request) -> None:
    one = subject(name)
    model = one.adapt()
    one.run(model, 3)
    model.save(tmp_path / "snapshot")
    expected = one.run(model, 4, start=3)
    code = f"import sys; sys.path.insert(0, {str(request.config.rootpath / 'tests')!r})\n"
    code += f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    code += f"from conformance.subjects import subject as make; subject = make({name!r})"
    logits = continue_in_new_process(code, tmp_path / "snapshot", start=3, more=4)
    assert torch.equal(torch.tensor(logits, dtype=torch.float64), torch.stack([x.double() for x in expected]))
