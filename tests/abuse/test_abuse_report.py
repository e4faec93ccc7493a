"""The table says what the records say."""

from typing import Any

from abuse.report import as_markdown


def stream(method: str, guard: bool, worst: float) -> dict[str, Any]:
    facts = {"accuracy": 90 + worst, "source": 90.0, "worst": worst, "passed": worst >= -2, "seconds": 1.0}
    name = f"{method}, class-sorted, {'on' if guard else 'off'}"
    return {"part": "streams", "name": name, "method": method, "scenario": "class-sorted", "guard": guard} | facts


def test_the_worst_method_is_named_with_and_without_the_guard() -> None:
    records = [stream("tent", True, -0.5), stream("pl", True, -3.0), stream("tent", False, -70.0)]
    records.append({"part": "kills", "name": "random", "seconds": 2.0, "passed": True, "kills": 200, "lost": 0})
    records.append({"part": "reset", "name": "dpl", "seconds": 2.0, "passed": False, "error": "AssertionError: bits"})
    text = as_markdown(records)
    assert "| kills | 1 | 1 | random: kills 200, lost 0 |" in text
    assert "| reset | 1 | 0 | dpl: AssertionError: bits |" in text
    assert "| class-sorted | 2 | 1 of 2 | -3.0 (pl) | -70.0 (tent) |" in text
    assert "| tent | -0.5 / -70.0 |" in text
