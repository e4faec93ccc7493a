"""The table of an abuse run."""

from typing import Any

from abuse.scenarios import SCENARIOS

Record = dict[str, Any]


def as_markdown(records: list[Record]) -> str:
    """Everything tried, the streams as a table of methods."""
    others = [record for record in records if record["part"] != "streams"]
    streams = [record for record in records if record["part"] == "streams" and "error" not in record]
    return "\n".join([*_summary(others), "", *_worst(streams), "", *_gaps(streams)]) + "\n"


def _summary(records: list[Record]) -> list[str]:
    lines = ["| what | tried | passed | figures |", "|---|---|---|---|"]
    for part in dict.fromkeys(record["part"] for record in records):
        these = [record for record in records if record["part"] == part]
        passed = sum(record["passed"] for record in these)
        lines.append(f"| {part} | {len(these)} | {passed} | {'; '.join(_figures(these))} |")
    return lines


def _figures(records: list[Record]) -> list[str]:
    """The numbers of each record, if there are few records with any."""
    hidden = {"part", "name", "seconds", "passed", "scale"}
    told = []
    for record in records:
        facts = {key: value for key, value in record.items() if key not in hidden and isinstance(value, (int, float))}
        if facts and len(records) <= 8:
            told.append(f"{record['name']}: " + ", ".join(f"{key} {value:.4g}" for key, value in facts.items()))
        elif "error" in record:
            told.append(f"{record['name']}: {record['error']}")
    return told


def _worst(records: list[Record]) -> list[str]:
    """For each scenario the method that ended lowest against the source."""
    lines = ["| stream | methods | within the mark, guard on | worst, on | worst, off |", "|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        these = [record for record in records if record["scenario"] == scenario]
        on, off = ([record for record in these if record["guard"] is guard] for guard in (True, False))
        if on:
            within = f"{sum(record['passed'] for record in on)} of {len(on)}"
            lines.append(f"| {scenario} | {len(on)} | {within} | {_lowest(on)} | {_lowest(off)} |")
    return lines


def _lowest(records: list[Record]) -> str:
    if not records:
        return "-"
    lowest = min(records, key=lambda record: float(record["worst"]))
    return f"{lowest['worst']:+.1f} ({lowest['method']})"


def _gaps(records: list[Record]) -> list[str]:
    """Points above or below the source, guard on / off, methods by scenarios."""
    names = [name for name in SCENARIOS if any(record["scenario"] == name for record in records)]
    cells = {(r["method"], r["scenario"], r["guard"]): r["accuracy"] - r["source"] for r in records}
    lines = [f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method in dict.fromkeys(record["method"] for record in records):
        row = (" / ".join(_points(cells.get((method, name, guard))) for guard in (True, False)) for name in names)
        lines.append(f"| {method} | {' | '.join(row)} |")
    return lines


def _points(gap: float | None) -> str:
    return "" if gap is None else f"{gap:+.1f}"
