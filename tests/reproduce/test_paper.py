"""The paper's figures: complete, traceable, and wrong exactly where they are marked as wrong."""

import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from dpl.core.errors import SettingError
from dpl.reproduce import paper
from dpl.reproduce.paper import Table

PAPER = Path(__file__).resolve().parents[3] / "shared" / "paper" / "decoupled_prototype_learning.tex"
TABLES = ["table1", "table2", "table3", "table4", "table5", "table6", "table7", "table8", "supervised"]
CELLS = dict(zip(TABLES, [80, 269, 307, 342, 40, 87, 15, 20, 2], strict=True))
PAIRS = [(name, column) for name in TABLES for column in paper.load(name).averages]


def exact(table: Table, row: str, column: str) -> Decimal:
    return Decimal(str(table.cells[row, column].value))


def half_digit(table: Table, column: str) -> Decimal:
    return Decimal("0.5") * Decimal(10) ** -table.digits(column)


def distance_to_mean(table: Table, row: str, column: str) -> Decimal:
    members = [exact(table, row, member) for member in table.averages[column]]
    return abs(exact(table, row, column) - sum(members, Decimal(0)) / len(members))


def test_tables_are_listed_in_printed_order() -> None:
    assert paper.tables() == TABLES


@pytest.mark.parametrize(("name", "count"), CELLS.items())
def test_every_figure_is_there(name: str, count: int) -> None:
    assert len(paper.load(name).cells) == count


@pytest.mark.parametrize(("name", "column"), PAIRS)
def test_only_marked_averages_disagree_with_their_cells(name: str, column: str) -> None:
    table = paper.load(name)
    slack = half_digit(table, column) + half_digit(table, table.averages[column][0])
    wrong = {row for row in table.rows if distance_to_mean(table, row, column) > slack}
    # A misprinted average does not disturb the average over it: that one was taken from the printed figure.
    involved = [column, *(member for member in table.averages[column] if member not in table.averages)]
    assert wrong == {row for row in table.rows if any(table.cells[row, c].misprint for c in involved)}


@pytest.mark.parametrize(("name", "column"), PAIRS)
def test_last_digit_slips_are_exactly_the_marked_ones(name: str, column: str) -> None:
    table = paper.load(name)
    digit = half_digit(table, column)
    slack = digit + half_digit(table, table.averages[column][0])
    slips = {(r, column) for r in table.rows if digit < distance_to_mean(table, r, column) <= slack}
    assert slips == {cell for cell in table.last_digit if cell[1] == column}


@pytest.mark.parametrize("name", TABLES)
def test_printed_improvements_follow_from_the_printed_averages(name: str) -> None:
    table = paper.load(name)
    for column, improvement in table.improvements.items():
        rows = [row for row in table.rows if (row, column) in table.cells]
        assert len(rows) >= 3
        for row in rows:
            reference = exact(table, improvement.reference(row), improvement.column)
            gain = exact(table, row, improvement.column) - reference
            assert exact(table, row, column) == (gain if table.metric == "accuracy" else -gain)


def test_the_known_misprints() -> None:
    marked = {(n, *key) for n in TABLES for key, cell in paper.load(n).cells.items() if cell.misprint}
    assert marked == {
        ("table1", "swr_nsp", "average"),
        ("table2", "tent", "sketch->real"),
        ("table2", "tent", "clipart->average"),
        ("table2", "pl", "painting->average"),
        ("table2", "roid", "average"),
        ("table3", "pl", "average"),
        ("table5", "source", "vlcs"),
    }


@pytest.mark.parametrize("name", TABLES)
def test_every_mark_points_to_a_printed_cell(name: str) -> None:
    table = paper.load(name)
    assert table.last_digit <= set(table.cells)
    for note in table.notes:
        assert note.row is None or note.row in table.rows
        assert note.column is None or (note.row, note.column) in table.cells
    assert set(table.printed_as) == set(table.rows)
    assert table.metric in {"accuracy", "error"}
    assert all(isinstance(value, str) for value in table.protocol.values())


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "deviation"),
    [
        ("table1", "dpl_dagger", "pacs", 89.9, 0.39),
        ("table1", "shot", "vlcs", 64.7, 2.27),
        ("table2", "dpl", "painting->sketch", 40.2, None),
        ("table2", "adacontrast+dpl", "delta", 8.0, None),
        ("table2", "tent", "sketch->real", 1.8, None),
        ("table3", "roid+dpl", "jpeg_compression", 47.30, None),
        ("table3", "source", "gaussian_noise", 97.82, None),
        ("table4", "eata", "imagenet_c/3", 43.1, None),
        ("table4", "dpl", "cifar10_c/5", 16.7, None),
        ("table5", "dpl_star_dagger", "vlcs", 81.4, None),
        ("table6", "dpl_dagger", "mixer_b16/sketch", 73.3, None),
        ("table7", "all", "terraincognita", 51.6, None),
        ("table8", "proxy_nca", "average", 68.9, None),
        ("supervised", "ce", "cifar10", 95.3, None),
        ("supervised", "dpl", "cifar10", 78.7, None),
    ],
)
def test_spot_values(name: str, row: str, column: str, value: float, deviation: float | None) -> None:
    cell = paper.load(name).cells[row, column]
    assert (cell.value, cell.deviation) == (value, deviation)


def test_ours_in_table1_is_dpl_with_style_transfer() -> None:
    ours = [paper.load("table1").cells["dpl_dagger", c].value for c in paper.load("table1").columns]
    components = paper.load("table5")
    donors = paper.load("table7")
    assert ours == [components.cells["dpl_dagger", c].value for c in components.columns]
    assert ours == [donors.cells["unconfident", c].value for c in donors.columns]
    assert ours != [components.cells["dpl", c].value for c in components.columns]


def test_imagenet_c_is_measured_on_5000_images() -> None:
    table = paper.load("table3")
    single = [cell for (_, column), cell in table.cells.items() if table.digits(column) == 2]
    assert len(single) == 285
    assert all(round(cell.value * 100) % 2 == 0 for cell in single)


def test_severity_five_of_imagenet_c_repeats_the_table_by_corruption() -> None:
    by_corruption, by_severity = paper.load("table3"), paper.load("table4")
    for row in by_corruption.rows:
        assert exact(by_corruption, row, "average") == exact(by_severity, row, "imagenet_c/5")


def test_unprinted_cells_are_absent_and_wrong_names_are_errors() -> None:
    table = paper.load("table2")
    assert ("source", "delta") not in table.cells
    assert ("tast", "average") not in table.cells
    with pytest.raises(SettingError, match=r"no table 'tabel1'.*Did you mean 'table1'"):
        paper.load("tabel1")


def printed_numbers(table: Table) -> Counter[str]:
    numbers = Counter[str]()
    for (_, column), cell in table.cells.items():
        numbers[f"{cell.value:.{table.digits(column)}f}"] += 1
        if cell.deviation is not None:
            numbers[f"{cell.deviation:.2f}"] += 1
    return numbers


@pytest.mark.shared
@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside this checkout")
def test_no_figure_was_mistyped() -> None:
    tex = re.sub(r"\d\.\d+(pt|cm|in)\b", "", PAPER.read_text(encoding="utf-8"))
    bodies = re.findall(r"\\begin\{table.*?\\end\{table\*?\}", tex, re.DOTALL)
    assert len(bodies) == 8
    for name, body in zip(TABLES, bodies, strict=False):
        rows = body[body.index("\\begin{tabular") :]
        assert Counter(re.findall(r"\d+\.\d+", rows)) == printed_numbers(paper.load(name)), name
