"""Experiment files are read strictly, and say what the paper's tables need."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from bench.tiny import everything_file, grid_of, make_weights, units_of, write_yaml
from dpl.bench import BenchContext
from dpl.bench.domains import DOMAINS
from dpl.bench.grid import section_cells
from dpl.bench.section import SHIPPED, read_sections
from dpl.core.errors import DataError, SettingError
from dpl.reproduce import paper

CONFIGS = SHIPPED
TABLES = [name for name in paper.tables() if name.startswith("table")]


def content(**changes) -> dict:
    base = {"dataset": "pacs", "protocol": "leave_one_domain_out", "network": "debug_cnn", "methods": ["tent", "dpl"],
            "weights": "{weights}/{dataset}.safetensors", "batch_size": 8}  # fmt: skip
    return {key: value for key, value in (base | changes).items() if value is not None}


@pytest.fixture
def expand(everything, tmp_path):
    return lambda **changes: grid_of(write_yaml(tmp_path / "grid.yaml", content(**changes)), everything)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bacth_size": 8}, "unknown key 'bacth_size'. Did you mean 'batch_size'"),
        ({"dataset": "packs"}, "dataset='packs': expected one of 'pacs'"),
        ({"protocol": "continuous"}, "protocol='continuous': expected one of 'leave_one_domain_out'"),
        ({"methods": ["tentt"]}, "unknown method 'tentt'. Did you mean 'tent'"),
        ({"methods": {"tent": {"lrr": 1}}}, "'tent' has no setting 'lrr'. Did you mean 'lr'"),
        ({"methods": {"tent": 3}}, "methods: tent=3: expected settings"),
        ({"methods": []}, "methods: expected a list"),
        ({"settings": {"confidense": 1}}, "no method here has 'confidense'. Did you mean 'confidence'"),
        ({"settings": {"lr": "fast"}}, "lr='fast'"),
        ({"weights": "{weight}/x"}, "unknown word {weight}. Did you mean 'weights'"),
        ({"weights": None}, "weights: missing"),
        ({"batch_size": 0}, "pacs: batch_size=0: expected a whole number of at least 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"seeds": [-1]}, "seeds=-1: expected a whole number of at least 0"),
        ({"seeds": []}, "seeds: an empty list"),
        ({"targets": ["skitch"]}, "no domain 'skitch'. Did you mean 'sketch'"),
        ({"domains": ["sketch"]}, "names its streams by targets"),
        ({"sources": ["sketch"]}, "single_source"),
        ({"transform": "square big"}, "transform: 'square big'; expected"),
        ({"outliers": "pacs"}, "outliers: expected another data set than the stream's, or noise"),
        ({"outliers": "cifar"}, "outliers='cifar': expected one of None, 'noise'"),
        ({"outliers": "noise", "dataset": "cifar10", "protocol": "continual", "corrupt": True},
         "use a protocol that resets"),
        ({"limit": 2.5}, "limit=2.5 (float): expected a whole number of at least 1"),
        ({"severities": [5, 6]}, "severities=6: expected a whole number from 1 to 5"),
        ({"order": "random"}, "order='random': expected one of 'numpy', 'python'"),
        ({"methods": {"tent": {"batch_size": 0}}}, "methods: tent: batch_size=0"),
        ({"corrupt": True}, "corrupt: pacs is not a set of clean images"),
        ({"changing": 50}, "changing: needs corrupt: true and protocol: continual"),
        ({"dataset": "cifar10", "protocol": "continual", "corrupt": True, "changing": 9, "domains": "fog"},
         "changing: needs one severity"),
        ({"dataset": "cifar10", "protocol": "continual", "corrupt": True, "changing": 0}, "changing=0: expected"),
        ({"oracle": True}, "has no effect without selection"),
        ({"selection": 3}, "selection=3: expected true"),
        ({"selection": {"lr": 1}}, "lr=1: expected a list"),
        ({"selection": {"rate": [1]}}, "no method here has 'rate'"),
        ({"source": "train"}, "source='train': expected 'rest'"),
        ({"source": {"dataset": "cifar10", "spilt": "train"}}, "unknown key 'spilt'. Did you mean 'split'"),
        ({"source": {"dataset": "cifar10", "batch_size": 0}}, "source: batch_size=0: expected a whole number"),
        ({"source": {"dataset": "folder"}}, "folder needs domains"),
        ({"dataset": "cifar10_c", "targets": ["fog"], "protocol": "continual"}, "names its streams by domains"),
        ({"dataset": "cifar10_c"}, "needs a data set of domains"),
        ({"dataset": "cifar10_c", "protocol": "continual", "selection": True}, "selection: needs source domains"),
        ({"dataset": "cifar10_c", "protocol": "continual", "domains": ["fogg"]}, "Did you mean 'fog'"),
        ({"dataset": "cifar10_c", "protocol": "continual", "methods": ["eata"]}, "eata needs source images"),
        ({"sections": [{}, {}]}, "sections need different names"),
        ({"sections": {"a": 1}}, "sections: expected a list"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_the_file(expand, changes, message):
    with pytest.raises(SettingError) as error:
        expand(**changes)
    assert message in str(error.value)
    assert "grid.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: pacs\ndataset: vlcs\n", "line 2: duplicate key 'dataset'"),
        ("methods: {tent: {}, tent: {}}", "duplicate key 'tent'"),
        ("a: [1", "not YAML"),
        ("- 1", "expected keys"),
        ("", "expected keys"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=r"x\.yaml") as error:
        read_sections(path)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.yaml"):
        read_sections(tmp_path / "none.yaml")


def test_missing_weights_are_named_with_the_command_that_makes_them(expand):
    with pytest.raises(DataError, match=r"no source weights at .*pacs/sketch.*dpl train"):
        expand(weights="{weights}/{dataset}/{target}.safetensors", targets=["sketch"])


def test_exponents_are_numbers(expand):
    grid = expand(settings={"lr": "5e-5"}, methods={"tent": None, "pl": {"lr": "1E-3", "confidence": 0.8}})
    values = {cell.label: cell.candidates[0].target.settings for cell in grid.cells}
    assert values["tent"]["lr"] == 5e-5
    assert (values["pl"]["lr"], values["pl"]["confidence"]) == (1e-3, 0.8)


def test_the_seed_is_that_of_the_method_too(expand):
    assert [
        c.candidates[0].target.settings["seed"] for c in expand(seeds=[3, 4], targets="photo", methods=["tent"]).cells
    ] == [3, 4]


def test_rows_may_share_a_method(expand):
    rows = {"one": {"method": "dpl_dagger", "style_from": "all"}, "two": {"method": "dpl_dagger", "batch_size": 4}}
    grid = expand(methods=rows, targets=["photo"])
    one, two = (cell.candidates[0].target for cell in grid.cells)
    assert (one.method, one.settings["style_from"], one.batch_size) == ("dpl_dagger", "all", 8)
    assert (two.settings["style_from"], two.batch_size) == ("unconfident", 4)


def test_a_changed_section_gives_its_cells_without_a_file(expand, everything):
    grid = expand(seeds=[0, 1])
    single = replace(grid.sections[0], seeds=(1,), targets=("photo",))
    cells = section_cells(single, BenchContext(everything, everything / "weights", everything))
    assert [(cell.label, cell.seed, cell.candidates[0].target.domains) for cell in cells] == [
        ("tent", 1, ("photo",)), ("dpl", 1, ("photo",)),
    ]  # fmt: skip


def test_a_limit_on_the_command_line_bounds_the_files(everything, tmp_path):
    file = write_yaml(tmp_path / "g.yaml", content(limit=5, targets=["photo"], methods=["source"]))
    assert [grid_of(file, everything, n).cells[0].candidates[0].target.limit for n in (None, 3, 9)] == [5, 3, 5]


def test_paths_do_not_enter_the_key(everything, tmp_path):
    def keys(weights_name: str) -> list[str]:
        weights = make_weights(tmp_path / weights_name / "pacs.safetensors", 7)
        return [
            u.key for u in units_of(grid_of(write_yaml(tmp_path / "k.yaml", content(weights=str(weights))), everything))
        ]

    assert keys("here") == keys("there")


def test_a_reset_at_each_shift_makes_a_unit_of_each_domain(everything, tmp_path):
    grid = grid_of(everything_file(tmp_path), everything)
    by_set = {}
    for unit in units_of(grid):
        by_set.setdefault(unit.dataset, []).append(unit)
    assert {len(u.domains) for u in by_set["cifar100_c"]} == {1}
    assert {(len(u.domains), u.severities) for u in by_set["cifar10_c"]} == {(2, (3, 5))}
    assert {u.part for u in by_set["pacs"]} == {"inside"}
    assert {(u.trained_on, u.domains) for u in by_set["domainnet126"]} == {
        (("real",), ("clipart",)), (("sketch",), ("clipart",)),
    }  # fmt: skip


def trained(folder: Path, **changes) -> None:
    settings = {"dataset": "PACS", "target": "sketch", "source": None, "network": "debug_cnn", "trial_seed": 0}
    make_weights(folder / "best.safetensors", 7)
    (folder / "train.json").write_text(json.dumps({"settings": settings | changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "photo"}, "trained with target='photo'"),
        ({"trial_seed": 1}, "trained with trial_seed=1"),
        ({"network": "resnet18"}, "trained with network='resnet18'"),
        ({"target": None, "source": "photo"}, "needs target='sketch'"),
    ],
)
def test_weights_that_saw_the_target_or_another_split_are_refused(expand, tmp_path, changes, message):
    trained(tmp_path / "run", **changes)
    arguments = {"weights": str(tmp_path / "run" / "best.safetensors"), "targets": ["sketch"]}
    with pytest.raises(DataError, match=message):
        expand(**arguments)


def test_weights_of_the_same_target_split_and_network_are_accepted(expand, tmp_path):
    trained(tmp_path / "run")
    assert len(expand(weights=str(tmp_path / "run" / "best.safetensors"), targets=["sketch"]).cells) == 2


@pytest.mark.parametrize("table", TABLES)
def test_each_table_of_the_paper_has_a_file_with_its_rows(table):
    _, sections = read_sections(CONFIGS / f"{table}.yaml")
    printed = paper.load(table)
    for section in sections:
        assert [entry.label for entry in section.methods] == list(printed.rows), section.name
    heads = {column.partition("/")[0] for column in printed.columns} | set(printed.columns)
    assert len(sections) == 1 or {section.name for section in sections} <= heads


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_can_be_expanded(path, tmp_path):
    _, sections = read_sections(path)
    for section in sections:
        words = {"weights": tmp_path / "weights", "dataset": section.dataset, "network": section.network}
        for seed, domain in product(section.seeds, DOMAINS.get(section.dataset, ("",))):
            file = Path(section.weights.format(**words, seed=seed, target=domain, source=domain))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"weights")
    (tmp_path / "imagenet_test_image_ids.txt").write_text("x")
    grid = grid_of(path, tmp_path)
    labels = {(cell.section, cell.label) for cell in grid.cells}
    assert labels == {(section.name, entry.label) for section in sections for entry in section.methods}
