"""The demo with one order of its stream: real digits, the real network, and the paper's point."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not (find_spec("sklearn") and find_spec("mlxtend")), reason="needs the demo extra")


def test_pl_falls_below_the_source_and_dpl_rises_far_above(tmp_path: Path) -> None:
    from dpl.cli.demo import run_demo, summary, write_picture
    from dpl.demo.digits import load_source_network
    from dpl.model.adaptive import DEFAULT_METHOD

    network, accuracy = load_source_network()
    assert accuracy > 95
    results = run_demo(network, 1, lambda _method, _result: None)
    found = {method: summary(own)["accuracy"] for method, own in results.items()}
    assert found["pl"] < found["source"] - 10
    assert found["dpl"] > found["source"] + 20
    assert found[DEFAULT_METHOD] == max(found.values())
    picture = write_picture(results, tmp_path / "curves.png")
    assert picture.stat().st_size > 10_000
