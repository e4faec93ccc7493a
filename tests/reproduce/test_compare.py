"""Measured figures beside printed ones: means, deviations, coverage, ranks, gains, footnotes."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from dpl.core.errors import SettingError
from dpl.data.facts import CORRUPTIONS, DOMAIN_FOLDERS
from dpl.reproduce import paper
from dpl.reproduce.compare import compare, oracle

SETS = {"pacs": "pacs", "vlcs": "vlcs", "office_home": "officehome", "terra_incognita": "terraincognita"}


def cell(grid, row, column):
    """The measured and the printed figure of a cell."""
    place = [c.name for c in grid.columns].index(column)
    found = next(r for r in grid.rows if r.name == row)
    return SimpleNamespace(measured=found.measured[place], reported=found.reported[place])


@pytest.fixture
def all_of_table1(make_row):
    """Every method on every domain with three seeds, accuracies drawn at random."""
    rng = np.random.default_rng(0)
    rows = []
    for method in paper.load("table1").rows:
        for dataset, key in SETS.items():
            for domain in DOMAIN_FOLDERS[key].counts:
                rows += [make_row(method, dataset, domain, rng.uniform(30, 90), seed=seed, n=50) for seed in range(3)]
    return rows


def test_a_cell_is_the_mean_over_seeds_of_the_mean_over_domains(all_of_table1):
    grid = compare(paper.load("table1"), all_of_table1)
    rows = [row for row in all_of_table1 if (row["label"], row["dataset"]) == ("tent", "vlcs")]
    by_seed = [statistics.fmean(row["accuracy"] for row in rows if row["seed"] == seed) for seed in range(3)]
    found = cell(grid, "tent", "vlcs").measured
    assert found.value == pytest.approx(np.mean(by_seed))
    assert found.deviation == pytest.approx(np.std(by_seed, ddof=1))
    assert (found.seeds, found.images, found.parts, found.expected) == ((0, 1, 2), 200, 4, 4)


def test_a_complete_average_is_over_the_four_columns_seed_by_seed(all_of_table1):
    grid = compare(paper.load("table1"), all_of_table1)
    by_seed = [
        statistics.fmean(r["accuracy"] for r in all_of_table1 if (r["label"], r["seed"]) == ("t3a", s))
        for s in range(3)
    ]
    found = cell(grid, "t3a", "average").measured
    assert found.parts == found.expected == 16
    assert found.value == pytest.approx(np.mean(by_seed))
    assert found.deviation == pytest.approx(np.std(by_seed, ddof=1))
    assert found.images == 16 * 50


def test_ranks_are_the_best_two_of_a_column(all_of_table1):
    grid = compare(paper.load("table1"), all_of_table1)
    ranked = sorted(grid.rows, key=lambda row: -row.measured[0].value)
    assert [row.measured[0].rank for row in ranked] == [1, 2] + [None] * (len(ranked) - 2)
    assert cell(grid, "dpl_dagger", "pacs").reported.rank == 1
    assert cell(grid, "tsd", "pacs").reported.rank == 2


def test_with_one_domain_the_average_tells_what_went_in(make_row):
    grid = compare(paper.load("table1"), [make_row("tent", "pacs", "sketch", 60.0)])
    assert (cell(grid, "tent", "pacs").measured.parts, cell(grid, "tent", "pacs").measured.expected) == (1, 4)
    average = cell(grid, "tent", "average").measured
    assert (average.value, average.parts, average.expected) == (60.0, 1, 16)
    assert average.deviation is None
    assert cell(grid, "tent", "vlcs").measured is None
    assert cell(grid, "tent", "vlcs").reported.value == 72.1
    assert cell(grid, "pl", "pacs").measured is None


def test_only_seeds_on_the_same_streams_are_averaged(make_row):
    rows = [make_row("tent", "pacs", d, 50.0, seed=s) for s in (0, 1) for d in ("art_painting", "sketch")]
    rows.append(make_row("tent", "pacs", "sketch", 90.0, seed=2))  # this seed lacks a domain
    found = cell(compare(paper.load("table1"), rows), "tent", "pacs").measured
    assert (found.seeds, found.value, found.parts) == ((0, 1), 50.0, 2)


def test_a_mean_over_fewer_streams_is_not_ranked(make_row):
    rows = [make_row("tent", "pacs", d, 50.0) for d in DOMAIN_FOLDERS["pacs"].counts]
    rows += [make_row("pl", "pacs", d, 40.0) for d in DOMAIN_FOLDERS["pacs"].counts]
    rows.append(make_row("t3a", "pacs", "photo", 99.0))
    grid = compare(paper.load("table1"), rows)
    assert [cell(grid, name, "pacs").measured.rank for name in ("tent", "pl", "t3a")] == [1, 2, None]


def test_two_experiments_for_one_cell_are_refused(make_row):
    rows = [make_row("tent", "pacs", "photo", 50.0), make_row("tent", "pacs", "photo", 60.0, unit="b", section="other")]
    with pytest.raises(SettingError, match="'pacs' and 'other' both measured pacs/photo"):
        compare(paper.load("table1"), rows)


def test_methods_beyond_the_paper_only_where_the_table_is_open(make_row):
    rows = [make_row("mine", "pacs", "photo", 50.0), make_row("pl", "pacs", "photo", 60.0)]
    extra = compare(paper.load("table1"), rows).rows[-1]
    assert (extra.name, extra.label, extra.reported[0]) == ("mine", "", None)
    assert [row.name for row in compare(paper.load("table5"), rows).rows] == list(paper.load("table5").rows)


def test_errors_gain_by_falling_and_know_their_reference(make_row):
    rows = [
        make_row("source", "domainnet126", "real", 60.0, source="clipart"),
        make_row("dpl", "domainnet126", "real", 67.0, source="clipart"),
    ]
    grid = compare(paper.load("table2"), rows)
    assert cell(grid, "dpl", "clipart->real").measured.value == pytest.approx(33.0)
    assert cell(grid, "dpl", "clipart->average").measured.parts == 1
    assert cell(grid, "dpl", "average").measured.expected == 12
    assert cell(grid, "dpl", "delta").measured.value == pytest.approx(7.0)
    assert cell(grid, "source", "delta").measured is None
    assert grid.left_out == ["painting", "real", "sketch"]


def test_a_gain_needs_the_same_streams_on_both_sides(make_row):
    rows = [make_row("source", "domainnet126", d, 60.0, source="clipart") for d in ("real", "sketch")]
    rows.append(make_row("dpl", "domainnet126", "real", 67.0, source="clipart"))
    assert cell(compare(paper.load("table2"), rows), "dpl", "delta").measured is None


def test_a_partner_is_the_row_without_dpl(make_row):
    rows = [
        make_row(name, "imagenet_c", c, value, severity=5)
        for name, value in (("eata", 40.0), ("eata+dpl", 42.5))
        for c in CORRUPTIONS
    ]
    grid = compare(paper.load("table3"), rows)
    assert cell(grid, "eata+dpl", "delta").measured.value == pytest.approx(2.5)
    assert cell(grid, "eata", "delta").measured is None
    assert cell(grid, "eata+dpl", "fog").measured.value == pytest.approx(57.5)


def test_table3_takes_severity_five_of_the_fifteen_alone(make_row):
    rows = [
        make_row("tent", "imagenet_c", "fog", 50.0, severity=3),
        make_row("tent", "imagenet_c", "spatter", 50.0, severity=5),
    ]
    assert not any(figure for row in compare(paper.load("table3"), rows).rows for figure in row.measured)


def test_table4_takes_regenerated_corruptions_and_leaves_out_other_data_sets(make_row):
    rows = [make_row("tent", "cifar10", c, 80.0, severity=5, corrupt=0, n=2000) for c in CORRUPTIONS[:7]]
    grid = compare(paper.load("table4"), rows)
    found = cell(grid, "tent", "cifar10_c/5").measured
    assert (found.value, found.parts, found.expected, found.images) == (20.0, 7, 15, 14_000)
    assert cell(grid, "tent", "cifar10_c/average").measured.expected == 75
    assert [column.name for column in grid.columns] == [f"cifar10_c/{s}" for s in (1, 2, 3, 4, 5, "average")]
    assert grid.left_out == ["cifar100_c", "imagenet_c"]


def test_table6_goes_by_the_network(make_row):
    rows = [make_row("tsd", "pacs", "photo", 96.0, network=n) for n in ("vit_base_patch16_224.augreg_in21k",)]
    grid = compare(paper.load("table6"), rows)
    assert cell(grid, "tsd", "vit_b16/photo").measured.value == 96.0
    assert grid.left_out == ["resnet18", "mixer_b16"]


def test_misprints_are_marked_and_never_the_best():
    grid = compare(paper.load("table2"), [])
    wrong = cell(grid, "tent", "sketch->real")
    assert wrong.reported.value == 1.8
    assert wrong.reported.rank is None
    (mark,) = wrong.reported.marks
    assert grid.footnotes[mark].startswith("Misprint in the paper (tent, sketch->real): 1.8 is impossible")
    assert len(set(grid.footnotes.values())) == len(grid.footnotes)


def test_a_shared_slip_of_the_last_digit_has_one_footnote():
    grid = compare(paper.load("table2"), [])
    marks = cell(grid, "adacontrast+dpl", "clipart->average").reported.marks
    assert marks == cell(grid, "adacontrast+dpl", "real->average").reported.marks
    assert len(marks) == 1


def test_equal_figures_share_a_rank_and_all_equal_have_none(make_row):
    rows = [make_row(m, "pacs", "photo", v) for m, v in (("pl", 50.01), ("tent", 50.04), ("norm", 48.0), ("sar", 40.0))]
    grid = compare(paper.load("table1"), rows)
    assert [cell(grid, m, "pacs").measured.rank for m in ("pl", "tent", "norm", "sar")] == [1, 1, 2, None]
    same = compare(paper.load("table1"), rows[:2])
    assert cell(same, "pl", "pacs").measured.rank is None


def test_the_oracle_is_a_table_of_its_own_where_it_was_run(make_row):
    row = make_row("pl", "pacs", "photo", 50.0)
    assert oracle(paper.load("table1"), [row]) is None
    grid = oracle(paper.load("table1"), [row | {"oracle_accuracy": 58.0}])
    assert cell(grid, "pl", "pacs").measured.value == 58.0
    assert "oracle" in grid.title


@pytest.mark.parametrize("name", [n for n in paper.tables() if n != "supervised"])
def test_every_table_can_be_shown_without_a_measurement(name):
    table = paper.load(name)
    grid = compare(table, [])
    assert [column.name for column in grid.columns] == list(table.columns)
    printed = {(r.name, c.name): f for r in grid.rows for c, f in zip(grid.columns, r.reported, strict=True) if f}
    assert printed.keys() == table.cells.keys()
    assert all(
        (f.value, f.deviation) == (table.cells[key].value, table.cells[key].deviation) for key, f in printed.items()
    )
