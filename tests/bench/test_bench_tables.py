"""One frame of measured rows, and tables of means over seeds."""

import subprocess
import sys

import pytest

from dpl.bench import frame, measured_tables
from dpl.bench.run import unit_accuracy


def row(label: str, column: str, seed: int, accuracy: float, section: str = "pacs") -> dict:
    return {"section": section, "label": label, "column": column, "seed": seed, "visit": 0, "accuracy": accuracy,
            "n": 10, "regenerated": False, "batch_size": 8, "holdout": 0.2, "part": "inside",
            "protocol": "reset_each_shift"}  # fmt: skip


ROWS = [
    row("tent", "sketch", 0, 40.0), row("tent", "sketch", 1, 60.0), row("tent", "photo", 0, 80.0),
    row("dpl", "sketch", 0, 70.0), row("dpl", "other", 0, 1.0, section="vlcs"),
]  # fmt: skip


def test_a_table_has_means_over_seeds_in_the_order_of_the_file() -> None:
    (title, pacs), (_, vlcs) = measured_tables(ROWS)
    assert list(pacs.index) == ["tent", "dpl"]
    assert list(pacs.columns) == ["sketch", "photo", "average"]
    assert pacs.loc["tent"].tolist() == [50.0, 80.0, 60.0]  # the average of seed 0, which alone has both
    assert title == (
        "pacs: online accuracy in percent, reset_each_shift, 80% training split of each target domain, batch 8, "
        "30 images, seeds 0, 1"
    )
    assert list(vlcs.columns) == ["other", "average"]


def test_a_row_that_lacks_a_segment_has_no_average() -> None:
    (_, pacs), _ = measured_tables(ROWS)
    assert pacs.loc["dpl"].isna().tolist() == [False, True, True]


def test_the_frame_keeps_every_field() -> None:
    assert frame(ROWS).to_dict("records") == ROWS
    assert measured_tables([]) == []


def test_a_unit_counts_each_segment_alike() -> None:
    assert unit_accuracy([{"accuracy": 10.0, "n": 1}, {"accuracy": 20, "n": 99}]) == pytest.approx(15.0)


def test_adapting_a_folder_and_importing_need_no_pandas() -> None:
    code = "import sys; sys.modules['pandas'] = None; import dpl.bench, dpl.cli.adapt, dpl.runs.folder, dpl.cli.demo"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
