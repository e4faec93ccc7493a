"""The example scripts run from beginning to end and show what they say."""

import runpy
from typing import Any

import pytest

from docs.pages import ROOT

pytest.importorskip("sklearn", reason="needs the demo extra")
pytest.importorskip("mlxtend", reason="needs the demo extra")


def run(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_adapt_your_model(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("adapt_your_model")
    assert names["adapted"] > names["source"] + 10
    assert names["end"] > names["source"] + 10
    assert names["unchanged"], "reset restores the source weights"
    assert [event.action for event in names["events"]], "the guard stops the collapse of pl"
    assert "equal predictions after loading: True" in capsys.readouterr().out


def test_compare_methods(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("compare_methods")
    accuracy = {name: result.accuracy for name, result in names["results"].items()}
    assert accuracy["dpl"] > accuracy["source"] + 10
    assert accuracy["dpl"] > accuracy["pl"]
    assert not names["folder"].exists(), "the example leaves nothing behind"
    out = capsys.readouterr().out
    assert all(f"\n{name:24}" in out for name in names["CANDIDATES"])


@pytest.mark.parametrize("name", ["adapt_your_model", "compare_methods"])
def test_cells_are_in_the_percent_format(name: str) -> None:
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    cells = [line for line in lines if line.startswith("# %%")]
    assert set(cells) == {"# %%", "# %% [markdown]"}
    assert f"examples/{name}.py" in (ROOT / "docs" / "getting-started.md").read_text()
