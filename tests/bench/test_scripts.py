"""Every script of benchmarks/ still fits the library: it is imported and prints its help."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ELSEWHERE = {"other_device": "torch_xla", "fuzz": "atheris"}  # packages that are not installed for the tests
NAMES = [path.stem for path in sorted(BENCHMARKS.glob("*.py"))] + ["speed.__main__", "speed.goals", "speed.table"]


def script(name: str) -> ModuleType:
    """Import a script; by its place, because tests/ has folders of the same names."""
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_imported_and_prints_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ELSEWHERE:
        pytest.importorskip(ELSEWHERE[name])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = script(name)
    if not hasattr(module, "argparse"):  # a part of other scripts, or one without options
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_digits_are_changed_by_a_generator_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    change, images = script("digits_study")._affine, torch.rand(4, 1, 32, 32)
    before = torch.get_rng_state()
    first, again = (change(images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())
