"""The demo with one order of its stream: real digits, the real network, and the paper's point."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not (find_spec("sklearn") and find_spec("mlxtend")), reason="needs the demo extra")


def test_pl_falls_below_the_source_and_dpl_rises_far_above(tmp_path: Path) -> None:
    from dpl.demo.digits import load_source_network
    from dpl.demo.show import run_demo, write_picture
    from dpl.model.adaptive import DEFAULT_METHOD

    network, accuracy = load_source_network()
    assert accuracy > 95
    rows = {row.method: row for row in run_demo(network, 1, lambda _method, _result: None)}
    assert rows["pl"].accuracy < rows["source"].accuracy - 10
    assert rows["dpl"].accuracy > rows["source"].accuracy + 20
    best = max(row.accuracy for row in rows.values())
    assert rows[DEFAULT_METHOD].accuracy == best
    picture = write_picture(list(rows.values()), tmp_path / "curves.png")
    assert picture.stat().st_size > 10_000
