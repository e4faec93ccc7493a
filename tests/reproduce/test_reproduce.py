"""`dpl reproduce` from the command line to the written tables, on made data."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from data.make import make_cifar, make_pacs, make_vlcs
from dpl.backbones import create
from dpl.bench.section import read_sections
from dpl.cli import main
from dpl.reproduce import paper
from dpl.reproduce.plan import Request, _shortened

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")

EXPERIMENT = """
title: tiny
protocol: leave_one_domain_out
network: debug_cnn
weights: "{weights}/{dataset}_{target}.safetensors"
transform: square 32
batch_size: 16
seeds: [0, 1]
settings: {lr: 1e-3, confidence: 0.2}
methods: {source: , tent: , dpl_dagger: , my_dpl: {method: dpl}}
sections:
  - {name: pacs, dataset: pacs}
  - {name: vlcs, dataset: vlcs}
"""


def save_weights(folder, dataset, domains, classes):
    folder.mkdir(exist_ok=True)
    for number, domain in enumerate(domains):
        torch.manual_seed(number)
        save_file(create("debug_cnn", num_classes=classes).state_dict(), folder / f"{dataset}_{domain}.safetensors")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """PACS and weights for three of its domains; VLCS is not there."""
    root = tmp_path_factory.mktemp("reproduce")
    make_pacs(root / "data", per_class=4)
    save_weights(root / "weights", "pacs", ("art_painting", "cartoon", "photo", "sketch"), 7)
    (root / "tiny.yaml").write_text(EXPERIMENT)
    return root


def call(place, what, out, *more, config="tiny.yaml"):
    return main(
        ["reproduce", what, "--data", str(place / "data"), "--weights", str(place / "weights"), "--out", str(out),
         "--config", str(place / config), "--threads", "1", *more]
    )  # fmt: skip


@pytest.fixture(scope="module")
def table1(place):
    """Table 1 with PACS alone, run once for all tests that look at it."""
    out = place / "out"
    assert call(place, "table1", out) == 0
    return out


def entry(out, name, row, column):
    grid = json.loads((out / f"{name}.json").read_text())["grids"][0]
    place = [c["name"] for c in grid["columns"]].index(column)
    found = next(r for r in grid["rows"] if r["name"] == row)
    return {kind: found[kind][place] for kind in ("measured", "reported")}


def test_pacs_is_filled_and_the_rest_is_named(table1):
    tent = entry(table1, "table1", "tent", "pacs")
    assert tent["reported"]["value"] == 84.6
    assert 0 <= tent["measured"]["value"] <= 100
    assert (tent["measured"]["parts"], tent["measured"]["expected"], tent["measured"]["seeds"]) == (4, 4, [0, 1])
    assert tent["measured"]["images"] == 4 * 23  # 80 % of 28 images in each domain
    assert entry(table1, "table1", "tent", "vlcs")["measured"] is None
    assert entry(table1, "table1", "tent", "average")["measured"]["parts"] == 4
    assert entry(table1, "table1", "my_dpl", "pacs")["reported"] is None


def test_what_is_missing_is_told_with_its_layout(table1):
    text = (table1 / "table1.md").read_text()
    missing = text[text.index("## What is missing") : text.index("## Protocol")]
    assert "- vlcs: DATA: VLCS was not found here" in missing
    assert "Caltech101/\n" in missing
    assert "measured with debug\\_cnn, the paper with resnet50" in text
    assert "2 seeds; the paper has 3" in text


def test_nothing_of_this_machine_is_written(table1, place):
    for path in table1.glob("table1.*"):
        assert str(place) not in path.read_text()
    assert (
        "dpl reproduce table1 --data DATA --weights WEIGHTS --out OUT --config CONFIG/tiny.yaml"
        in (table1 / "table1.md").read_text()
    )


def test_all_formats_have_the_figure(table1):
    figure = f"{entry(table1, 'table1', 'source', 'pacs')['measured']['value']:.1f}"
    for suffix in ("md", "tex"):
        assert figure in (table1 / f"table1.{suffix}").read_text()


def test_a_second_call_runs_nothing_and_says_the_same(table1, place, capsys):
    before = {path: path.stat().st_mtime_ns for path in (table1 / "runs" / "units").glob("*/*")}
    text = (table1 / "table1.md").read_text()
    assert call(place, "table1", table1) == 0
    assert {path: path.stat().st_mtime_ns for path in (table1 / "runs" / "units").glob("*/*")} == before
    assert (table1 / "table1.md").read_text() == text
    assert "What is missing:" in capsys.readouterr().out


def test_a_table_of_fewer_rows_takes_them_from_the_same_store(table1, place, tmp_path, capsys):
    code = call(place, "table5", tmp_path, "--store", str(table1 / "runs"), "--no-run", "--json")
    document = json.loads(capsys.readouterr().out)["document"]
    assert code == 0
    grid = document["grids"][0]
    assert [r["name"] for r in grid["rows"] if r["measured"][0]] == ["source", "dpl_dagger"]
    assert "my_dpl" not in {item["subject"] for item in document["settings"]}
    assert entry(tmp_path, "table5", "dpl_dagger", "pacs")["measured"] == grid["rows"][-1]["measured"][0]


def test_limit_and_seeds_make_another_smaller_experiment(place, tmp_path):
    assert call(place, "table1", tmp_path, "--limit", "5", "--seeds", "1") == 0
    found = entry(tmp_path, "table1", "tent", "pacs")["measured"]
    assert (found["images"], found["seeds"], found["deviation"]) == (20, [0], None)
    assert "At most 5 images of each domain were used." in (tmp_path / "table1.md").read_text()


def test_without_some_weights_the_other_domains_are_shown(place, tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT.replace("{dataset}_{target}", "{dataset}_{target}_{seed}"))
    for seed, domain in ((0, "photo"), (0, "sketch"), (1, "photo")):
        source = place / "weights" / f"pacs_{domain}.safetensors"
        (place / "weights" / f"pacs_{domain}_{seed}.safetensors").write_bytes(source.read_bytes())
    assert call(place, "table1", tmp_path / "out", config=str(tmp_path / "tiny.yaml")) == 0
    found = entry(tmp_path / "out", "table1", "tent", "pacs")["measured"]
    assert (found["parts"], found["seeds"]) == (2, [0])
    assert "art_painting seed 0, cartoon seed 0, art_painting seed 1" in capsys.readouterr().out


def test_an_experiment_on_class_folders_finds_its_images(place, tmp_path):
    text = EXPERIMENT.replace("leave_one_domain_out", "reset_each_shift").replace("{dataset}_{target}", "pacs_photo")
    text = text[: text.index("sections:")] + "sections:\n  - {name: pacs, dataset: folder, domains: [PACS/sketch]}\n"
    (tmp_path / "tiny.yaml").write_text(text)
    call(place, "table1", tmp_path / "out", config=str(tmp_path / "tiny.yaml"))  # the table itself has no such column
    assert len(list((tmp_path / "out").rglob("results.jsonl"))) == 8


def test_weights_of_another_split_cost_their_own_cells_alone(place, tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT.replace("{dataset}_{target}", "{target}/best"))
    for domain in ("photo", "sketch"):
        folder = tmp_path / "weights" / domain
        folder.mkdir(parents=True)
        (folder / "best.safetensors").write_bytes((place / "weights" / f"pacs_{domain}.safetensors").read_bytes())
        trained = {"network": "debug_cnn", "dataset": "PACS", "target": domain, "source": None, "trial_seed": 1}
        (folder / "train.json").write_text(json.dumps({"settings": trained}))
    words = ["--weights", str(tmp_path / "weights"), "--limit", "8"]
    assert call(place, "table1", tmp_path / "out", *words, config=str(tmp_path / "tiny.yaml")) == 0
    found = entry(tmp_path / "out", "table1", "tent", "pacs")["measured"]
    assert (found["parts"], found["seeds"]) == (2, [1])
    told = capsys.readouterr().out
    assert "photo seed 0: " in told
    assert "was trained with trial_seed=1; this experiment needs trial_seed=0" in told


def test_stored_results_are_drawn_again_without_data_and_weights(table1, place, tmp_path, capsys):
    words = ["reproduce", "table1", "--store", str(table1 / "runs"), "--config", str(place / "tiny.yaml")]
    assert main([*words, "--out", str(tmp_path), "--no-run"]) == 0
    assert entry(tmp_path, "table1", "tent", "pacs") == entry(table1, "table1", "tent", "pacs")
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "--data DIR: missing" in capsys.readouterr().err


def test_quick_uses_several_batches(tmp_path):
    (tmp_path / "wide.yaml").write_text(EXPERIMENT.replace("batch_size: 16", "batch_size: 64"))
    _, sections = read_sections(tmp_path / "wide.yaml")
    request = Request(data=tmp_path, weights=tmp_path, out=tmp_path, store=tmp_path, quick=True)
    assert _shortened(sections[0], request).limit == 5 * 64


def test_settings_chosen_on_source_validation_bring_the_oracle_beside(place, tmp_path):
    searched = EXPERIMENT.replace("seeds: [0, 1]", "seeds: [0]\nselection: {lr: [1e-4, 1e-2]}\noracle: true").replace(
        ", confidence: 0.2", ""
    )
    (tmp_path / "tiny.yaml").write_text(
        searched.replace("source: , tent: , dpl_dagger: , my_dpl: {method: dpl}", "tent: ")
    )
    assert call(place, "table1", tmp_path, "--limit", "8", config=str(tmp_path / "tiny.yaml")) == 0
    document = json.loads((tmp_path / "table1.json").read_text())
    assert len(document["grids"]) == 2
    assert "(chosen on source validation)" in document["settings"][0]["text"]
    assert not any("Settings were fixed" in text for text in document["differences"])
    chosen, best = (
        next(r for r in grid["rows"] if r["name"] == "tent")["measured"][0]["value"] for grid in document["grids"]
    )
    assert best >= chosen


def test_quick_makes_no_search(place, tmp_path):
    searched = EXPERIMENT.replace("seeds: [0, 1]", "seeds: [0, 1, 2]\nselection: true\noracle: true").replace(
        ", confidence: 0.2", ""
    )
    (tmp_path / "tiny.yaml").write_text(searched.replace("tent: , dpl_dagger: , my_dpl: {method: dpl}", "tent: "))
    assert call(place, "table1", tmp_path, "--quick", config=str(tmp_path / "tiny.yaml")) == 0
    assert entry(tmp_path, "table1", "tent", "pacs")["measured"]["seeds"] == [0]
    assert len(list((tmp_path / "runs" / "units").iterdir())) == 2 * 4


def test_progress_names_the_row_once(place, tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT.replace("source: , tent: , dpl_dagger: , ", ""))
    assert call(place, "table1", tmp_path, "--seeds", "1", config=str(tmp_path / "tiny.yaml")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tiny: 0/4 my_dpl on pacs/art_painting, seed 0: ")
    assert {line.count("dpl") for line in lines} == {1}


@pytest.mark.parametrize("what", ["table1", "fig1"])
def test_quick_says_above_everything_that_its_figures_mean_nothing(what, place, tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT.replace("tent: , dpl_dagger: , my_dpl: {method: dpl}", "pl: "))
    assert call(place, what, tmp_path, "--quick", config=str(tmp_path / "tiny.yaml")) == 0
    assert "Made with --quick" in capsys.readouterr().out.splitlines()[0]
    second = [line for line in (tmp_path / f"{what}.md").read_text().splitlines() if line][1]
    assert second.startswith("**Made with --quick")
    assert "its figures mean nothing. One batch shows nothing about the methods" in second


def test_streams_of_one_batch_are_cautioned_without_quick_too(place, tmp_path, capsys):
    assert call(place, "table1", tmp_path, "--limit", "16", "--seeds", "1") == 0
    assert capsys.readouterr().out.startswith("One batch shows nothing about the methods, because each predicts")
    assert call(place, "table1", tmp_path, "--limit", "17", "--seeds", "1") == 0
    assert "One batch" not in capsys.readouterr().out


def test_a_method_that_fails_is_named_and_the_others_are_shown(place, tmp_path, capsys):
    failing = EXPERIMENT.replace("my_dpl: {method: dpl}", "bad: {method: dpl_dagger, style_layer: nowhere}")
    (tmp_path / "tiny.yaml").write_text(failing)
    code = call(place, "table1", tmp_path, "--seeds", "1", "--json", config=str(tmp_path / "tiny.yaml"))
    told = json.loads(capsys.readouterr().out)
    assert code == 1
    assert len(told["failed"]) == 4
    reasons = [item for item in told["document"]["missing"] if item["subject"] == "pacs: bad"]
    assert "failed on pacs/art_painting, seed 0" in reasons[0]["text"]
    assert "nowhere" in reasons[0]["text"]
    assert entry(tmp_path, "table1", "tent", "pacs")["measured"]["parts"] == 4


def test_no_run_on_an_empty_store_says_so(place, tmp_path, capsys):
    assert call(place, "table1", tmp_path / "new", "--no-run") == 2
    told = capsys.readouterr().err
    assert re.search(r"--no-run: .*new/runs holds no result of table1", told)
    assert "leave --no-run out" in told
    assert not (tmp_path / "new").exists()


def test_no_data_at_all_says_what_is_needed(place, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ["reproduce", "table1", "--data", str(empty), "--out", str(tmp_path / "o"), "--config"]
    assert main([*arguments, str(place / "tiny.yaml")]) == 2
    told = capsys.readouterr().err
    assert "nothing could be run" in told
    assert "- pacs: " in told
    assert "- vlcs: " in told
    assert "expected layout:\n  VLCS/\n    Caltech101/" in told


@pytest.mark.parametrize(("what", "meant"), [("tabel4", "table4"), ("superviced", "supervised")])
def test_a_wrong_name_gets_the_nearest(what, meant, place, tmp_path, capsys):
    assert call(place, what, tmp_path) == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


def test_wrong_numbers_and_files_are_named(place, tmp_path, capsys):
    assert call(place, "table1", tmp_path, "--seeds", "0") == 2
    assert "--seeds: 0: expected a whole number of at least 1" in capsys.readouterr().err
    assert call(place, "table1", tmp_path, config="nowhere.yaml") == 2
    assert "nowhere.yaml" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text(EXPERIMENT.replace("batch_size", "batchsize"))
    assert call(place, "table1", tmp_path, config=str(tmp_path / "bad.yaml")) == 2
    assert "Did you mean 'batch_size'?" in capsys.readouterr().err


def test_an_experiment_without_the_tables_rows_is_refused(place, tmp_path, capsys):
    assert call(place, "table7", tmp_path) == 2
    assert "contains none of the requested rows: confident, all, unconfident" in capsys.readouterr().err


def test_vlcs_fills_its_column_as_soon_as_it_is_there(place, tmp_path):
    make_vlcs(tmp_path / "data", per_class=3)
    save_weights(tmp_path / "weights", "vlcs", ("Caltech101", "LabelMe", "SUN09", "VOC2007"), 5)
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT)
    assert call(tmp_path, "table1", tmp_path / "out", "--seeds", "1") == 0
    assert entry(tmp_path / "out", "table1", "source", "vlcs")["measured"]["parts"] == 4
    assert entry(tmp_path / "out", "table1", "source", "pacs")["measured"] is None


def test_supervised_trains_both_losses_and_writes_them(tmp_path, capsys):
    make_cifar(tmp_path / "data", split="train", count=60)
    make_cifar(tmp_path / "data", split="test", count=30, seed=1)
    (tmp_path / "small.yaml").write_text("{network: debug_cnn, epochs: 2, batch_size: 20}")
    arguments = ["reproduce", "supervised", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--config", str(tmp_path / "small.yaml"), "--seeds", "2"]) == 0
    found = {loss: entry(tmp_path / "out", "supervised", loss, "cifar10") for loss in ("ce", "dpl")}
    assert [found[loss]["reported"]["value"] for loss in ("ce", "dpl")] == [95.3, 78.7]
    assert [found[loss]["measured"]["seeds"] for loss in ("ce", "dpl")] == [[0, 1], [0, 1]]
    assert found["ce"]["measured"]["images"] == 30
    text = (tmp_path / "out" / "supervised.md").read_text()
    assert "cifar10: measured with debug\\_cnn, the paper with resnet50" in text
    assert "optimizer, schedule, augmentation, tau, eta and beta are ours" in text
    assert "ce, seed 1: epoch 2/2" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "words"), [
    ("{epoch: 2}", "Did you mean 'epochs'?"), ("{seed: 3}", "seed: leave it out"), ("[1, 2]", "expected keys"),
])  # fmt: skip
def test_supervised_names_a_wrong_setting(text, words, tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(text)
    arguments = ["reproduce", "supervised", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--config", str(tmp_path / "small.yaml")]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "small.yaml" in told


def test_supervised_without_data_or_runs_says_so(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    arguments = ["reproduce", "supervised", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "cifar-10-batches-bin" in capsys.readouterr().err
    assert main([*arguments, "--no-run"]) == 2
    assert "holds no finished run" in capsys.readouterr().err


@pytest.mark.parametrize("what", [name for name in paper.tables() if name != "supervised"])
def test_every_table_has_its_experiment_file_and_says_what_it_needs(what, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    assert main(["reproduce", what, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"{what}: nothing could be run" in told
    assert "was not found here" in told or "no such file" in told
    assert not (tmp_path / "out").exists()
