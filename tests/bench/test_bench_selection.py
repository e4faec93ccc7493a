"""Settings are chosen on the source domains alone; what would be best on the target is shown and not used."""

import math

import numpy as np
import pytest

from bench.tiny import context_of, grid_of, write_yaml
from dpl.bench import Candidate, Cell, GridRun, Outcome, Store, Unit, cell_rows
from dpl.bench.store import best, chosen, oracle, runnable_units


def unit(lr: float, domain: str, part: str) -> Unit:
    return Unit(
        dataset="pacs", domains=(domain,), part=part, batch_size=8, seed=0, network="debug_cnn", weights="0" * 64,
        method="tent", settings={"lr": lr},
    )  # fmt: skip


def cell(with_oracle: bool = True, lrs=(5e-6, 5e-5, 5e-4)) -> Cell:
    built = [
        Candidate({"lr": lr}, unit(lr, "sketch", "inside"), tuple(unit(lr, d, "outside") for d in ("photo", "cartoon")))
        for lr in lrs
    ]
    return Cell("pacs", "tent", 0, tuple(built), oracle=with_oracle)


def commit(store: Store, of: Unit, accuracy: float) -> None:
    record = {"segment": of.domains[0], "visit": 0, "accuracy": accuracy, "n": 4}
    store.commit(of, Outcome([record], {"label": np.zeros(4, dtype=np.uint16)}))


def judged(store: Store, of: Cell, scores: list[tuple[float, float]]) -> None:
    for candidate, accuracies in zip(of.candidates, scores, strict=True):
        for validation, accuracy in zip(candidate.validation, accuracies, strict=True):
            commit(store, validation, accuracy)


def test_the_papers_grid_in_its_order(everything, tmp_path):
    content = {
        "dataset": "pacs", "protocol": "leave_one_domain_out", "targets": ["sketch"], "network": "debug_cnn",
        "weights": "{weights}/pacs.safetensors", "batch_size": 8, "selection": True, "methods": ["tent", "source"],
    }  # fmt: skip
    tent, source = grid_of(write_yaml(tmp_path / "grid.yaml", content), everything).cells
    assert [candidate.values for candidate in tent.candidates] == [
        {"lr": 5e-6, "steps": 1}, {"lr": 5e-6, "steps": 2}, {"lr": 5e-5, "steps": 1}, {"lr": 5e-5, "steps": 2},
        {"lr": 5e-4, "steps": 1}, {"lr": 5e-4, "steps": 2},
    ]  # fmt: skip
    assert [candidate.values for candidate in source.candidates] == [{}]


@pytest.mark.parametrize(
    ("scores", "place"), [([1.0, 3.0, 2.0], 1), ([2.0, 2.0], 0), ([math.nan, 0.0], 1), ([math.nan, math.nan], 0)]
)
def test_of_equals_the_earlier_wins_and_what_is_no_number_never(scores, place):
    assert best(scores) == place


def test_the_source_decides_although_the_target_disagrees(tmp_path):
    store, tent = Store(tmp_path), cell()
    judged(store, tent, [(90.0, 80.0), (95.0, 85.0), (20.0, 30.0)])
    for candidate, accuracy in zip(tent.candidates, (50.0, 40.0, 70.0), strict=True):
        commit(store, candidate.target, accuracy)
    assert chosen(tent, store).values == {"lr": 5e-5}
    assert oracle(tent, store).values == {"lr": 5e-4}
    (row,) = cell_rows([tent], store)
    assert (row["accuracy"], row["oracle_accuracy"], row["chosen"]) == (40.0, 70.0, {"lr": 5e-5})


def test_the_mean_over_domains_decides_not_the_best_single_one(tmp_path):
    store, tent = Store(tmp_path), cell()
    judged(store, tent, [(99.0, 10.0), (60.0, 60.0), (60.0, 60.0)])
    assert chosen(tent, store).values == {"lr": 5e-5}


def test_no_target_is_run_before_all_candidates_are_judged(tmp_path):
    store, tent = Store(tmp_path), cell(with_oracle=False)
    first, *rest = [u for c in tent.candidates for u in c.validation]
    assert {u.part for u in runnable_units(tent, store)} == {"outside"}
    commit(store, first, 50.0)
    assert [u.key for u in runnable_units(tent, store)] == [u.key for u in rest]
    for other in rest:
        commit(store, other, 40.0)
    assert [u.key for u in runnable_units(tent, store)] == [tent.candidates[0].target.key]
    commit(store, tent.candidates[0].target, 10.0)
    assert runnable_units(tent, store) == []
    assert oracle(tent, store) is None


def test_the_oracle_runs_the_others_after_the_chosen_one(tmp_path):
    store, tent = Store(tmp_path), cell()
    judged(store, tent, [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)])
    assert [u.settings["lr"] for u in runnable_units(tent, store)] == [5e-4, 5e-6, 5e-5]


def test_selection_end_to_end_never_streams_the_target_for_the_choice(everything, tmp_path):
    content = {
        "dataset": "pacs", "protocol": "leave_one_domain_out", "targets": ["sketch"], "network": "debug_cnn",
        "weights": "{weights}/{dataset}.safetensors", "batch_size": 8, "selection": {"lr": ["1e-4", 10.0]},
        "methods": {"tent": None, "t3a": {"grid": {"filter_k": [1, 5]}}, "source": None, "pl": {"lr": 0.1}},
    }  # fmt: skip
    grid = grid_of(write_yaml(tmp_path / "select.yaml", content), everything)
    counts = {c.label: len(c.candidates) for c in grid.cells}
    assert counts == {"tent": 2, "t3a": 2, "source": 1, "pl": 1}
    store = Store(tmp_path / "out")
    assert GridRun(grid.cells, store, context_of(everything, grid)).run() == {}
    streamed = [(u.method, u.domains[0], u.part) for u in store.units()]
    assert streamed.count(("tent", "sketch", "inside")) == 1
    for domain in ("art_painting", "cartoon", "photo"):
        assert streamed.count(("tent", domain, "outside")) == 2
    assert ("tent", "sketch", "outside") not in streamed
