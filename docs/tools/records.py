"""Read what the documentation already records: parity figures and measured rows."""

from dataclasses import dataclass

__all__ = ["Row", "Trace", "between", "parity", "results", "table"]

# Traces whose name does not begin with the method's own, once the library's prefix is off.
_ALIASES = {"shotim": "shot_im", "tentprebn": "tent_prebn", "tentclf": "tent", "tentfull": "tent", "plclf": "pl"}
_LIBRARIES = ("rmtlib_", "t3alib_", "tsdrepo_", "eata_official_", "sar_official_")


@dataclass(frozen=True)
class Trace:
    """One line of the parity table."""

    name: str
    method: str
    whose: str
    logits: float


@dataclass(frozen=True)
class Row:
    """One line of the table of all methods."""

    label: str
    norm: str
    output: str
    figures: tuple[str, ...]


def table(text: str, first: str) -> list[list[str]]:
    """Return the cells below the header of the Markdown table whose first column is called `first`."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return rows


def parity(text: str) -> list[Trace]:
    """Read the parity table of docs/methods.md."""
    return [Trace(name, _traced(name), whose, float(logits)) for name, whose, logits, _ in table(text, "trace")]


def results(text: str) -> list[Row]:
    """Read the table of docs/results/all_methods.md."""
    return [Row(label, norm, output, tuple(rest)) for label, norm, output, *rest in table(text, "method")]


def between(text: str, begin: str, end: str) -> tuple[str, str]:
    """Return what stands before `begin` and after `end`; both must be there."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no part between {begin} and {end}; put both lines back where the table belongs")
    return before, after


def _traced(trace: str) -> str:
    """Return the method that a trace belongs to, from its name."""
    for library in _LIBRARIES:
        trace = "sar" if trace.startswith("sar_official_") else trace.removeprefix(library)
    for alias, method in _ALIASES.items():
        if trace.split("_")[0] == alias:
            return method
    return "tast_bn" if trace == "tast_bn" else trace.split("_")[0]
