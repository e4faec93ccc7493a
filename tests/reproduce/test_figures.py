"""The paper's figures from made data: files, axes, order, and lines that are the store's numbers."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import PolyCollection
from safetensors.torch import save_file

from data.make import make_pacs
from dpl.backbones import create
from dpl.bench import Store
from dpl.cli import main
from dpl.reproduce import embeddings, figures
from dpl.reproduce.plotting import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")

HEAD = """
title: tiny
dataset: pacs
targets: [cartoon, sketch]
protocol: leave_one_domain_out
network: debug_cnn
weights: "{weights}/pacs_{target}.safetensors"
transform: square 32
batch_size: 8
seeds: [0, 1]
settings: {lr: 1e-3, confidence: 0.15}
"""
FIG1 = HEAD + "methods: {source: , pl: , dpl: }\n"
ONE_SEED = HEAD.replace("[0, 1]", "[0]")
FIG4 = ONE_SEED + "methods:\n" + "".join(
    f"  {m} {b}: {{method: {m}, batch_size: {b}}}\n" for m in ("dpl", "dpl_star", "tsd", "pl", "tent") for b in (8, 16)
)  # fmt: skip
FIG5 = (
    HEAD
    + """methods:
  tau 1: {method: dpl, temperature: 1.0}
  tau 0.1: {method: dpl, temperature: 0.1}
  eta 0.5: {method: dpl, momentum: 0.5}
  beta 2: {method: dpl, reg_weight: 2.0}
  range dpl all: {method: dpl, scope: all}
  range dpl affine: {method: dpl, scope: affine}
  range pl all: {method: pl, scope: all}
  range pl affine: {method: pl, scope: affine}
"""
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """PACS with 28 images in each domain, weights for two targets, and an experiment file for each figure."""
    root = tmp_path_factory.mktemp("figures")
    make_pacs(root / "data", per_class=4)
    (root / "weights").mkdir()
    for number, domain in enumerate(("cartoon", "sketch")):
        torch.manual_seed(number)
        save_file(create("debug_cnn", num_classes=7).state_dict(), root / "weights" / f"pacs_{domain}.safetensors")
    for name, text in (("fig1", FIG1), ("fig2", FIG1), ("fig3", FIG1), ("fig4", FIG4), ("fig5", FIG5)):
        (root / f"{name}.yaml").write_text(text)
    return root


def call(place, what, out, *more, config=None):
    return main(
        ["reproduce", what, "--data", str(place / "data"), "--weights", str(place / "weights"), "--out", str(out),
         "--config", str(config or place / f"{what}.yaml"), "--store", str(place / "runs"), "--threads", "1", *more]
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(place):
    """Every figure, made once for all tests that look at it."""
    for what in ("fig1", "fig2", "fig3", "fig4", "fig5"):
        assert call(place, what, place / "out") == 0
    return place / "out"


@pytest.fixture
def close():
    yield
    plt.close("all")


def data_of(made, what):
    return json.loads((made / f"{what}.json").read_text())["data"]


def stored(place, **wanted):
    """Rows of the store by (method, domain, seed); the last one wins where other settings differ."""
    return {(row["method"], row["domains"][0], row["seed"]): row for row in Store(place / "runs").rows(**wanted)}


def bands(axis):
    return [shape for shape in axis.collections if isinstance(shape, PolyCollection)]


@pytest.mark.parametrize("what", ["fig1", "fig2", "fig3", "fig4", "fig5"])
def test_every_format_is_written_and_says_how_it_was_obtained(what, made, place):
    for suffix in (*FORMATS, "md", "json"):
        assert (made / f"{what}.{suffix}").stat().st_size > 300
    assert (made / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    assert (made / f"{what}.pdf").read_bytes().startswith(b"%PDF")
    text = (made / f"{what}.md").read_text()
    assert f"]({what}.png)" in text
    assert "What the paper shows" in text
    (command,) = re.findall(rf"dpl reproduce {what} --.*", text)
    assert {"--data DATA", "--weights WEIGHTS", "--store STORE"} <= set(re.findall(r"--\w+ \w+", command))
    assert "measured with debug\\_cnn, the paper with resnet50" in text.lower()
    assert "Partial" not in (made / f"{what}.svg").read_text()
    for suffix in ("md", "json", "svg"):
        assert str(place) not in (made / f"{what}.{suffix}").read_text()


def test_the_same_store_gives_the_same_bytes(made, place, tmp_path):
    assert call(place, "fig1", tmp_path, "--no-run") == 0
    for suffix in ("png", "svg", "pdf"):
        assert (tmp_path / f"fig1.{suffix}").read_bytes() == (made / f"fig1.{suffix}").read_bytes()


def test_figure1_is_the_stores_cumulative_accuracy(made, place):
    data = data_of(made, "fig1")
    assert list(data) == ["cartoon", "sketch"]
    store = Store(place / "runs")
    units = {(u.method, u.domains[0], u.seed): u for u in store.units() if u.batch_size == 8 and u.method != "dpl"}
    for method, seed in (("source", 0), ("pl", 1)):
        unit = units[method, "sketch", seed] if method == "source" else _plain_pl(store, seed)
        found = store.predictions(unit)
        correct = found["prediction"] == found["label"]
        expected = [100 * correct[:end].mean() for end in (8, 16, len(correct))]
        assert data["sketch"][method][str(seed)] == pytest.approx(expected)
        assert expected[-1] == pytest.approx(store.records(unit)[0]["accuracy"])


def _plain_pl(store, seed):
    return next(
        u for u in store.units()
        if (u.method, u.domains[0], u.seed, u.batch_size) == ("pl", "sketch", seed, 8) and u.settings["scope"] == "all"
    )  # fmt: skip


def test_figure1_axes_lines_and_bands(close):
    runs = {0: np.array([50.0, 40.0, 30.0]), 1: np.array([60.0, 50.0, 40.0])}
    figure = figures.draw_cumulative(
        {"cartoon": {"pl": runs, "dpl": {0: np.array([50.0, 60.0, 70.0])}}, "sketch": {"pl": runs}}
    )
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("cartoon", "sketch")
    assert first.get_xlabel() == "iterations"
    assert first.get_ylabel() == "cumulative accuracy (%)"
    assert [line.get_label() for line in first.lines] == ["CE (PL)", "DPL"]
    assert first.lines[0].get_xydata().tolist() == [[1, 55], [2, 45], [3, 35]]
    assert len(bands(first)) == 1  # two seeds of PL, one of DPL
    assert bands(first)[0].get_datalim(first.transData).intervaly.tolist() == [30, 60]


def test_figure2_counts_are_the_stores(made, place):
    counts = data_of(made, "fig2")["counts"]
    store = Store(place / "runs")
    found = store.predictions(_plain_pl(store, 0))
    assert counts["sketch"]["pl"]["0"] == np.bincount(found["prediction"], minlength=7).tolist()
    assert counts["sketch"]["truth"]["0"] == np.bincount(found["label"], minlength=7).tolist()
    assert sum(counts["sketch"]["dpl"]["1"]) == len(found["label"])


def test_figure2_order_of_panels(close):
    clouds = {m: embeddings.Features(np.zeros((3, 2)), np.arange(3), 50.0) for m in ("dpl", "source")}
    numbers = {"truth": [2, 2, 2], "pl": [6, 0, 0], "dpl": [2, 2, 2]}
    counts = {line: {0: np.array(own)} for line, own in numbers.items()}
    figure = embeddings.draw_features({"cartoon": embeddings.Target(clouds, counts)}, ("dog", "cat", "cow"))
    panels = figure.axes
    assert [axis.get_title() for axis in panels[:3]] == ["Source", "CE (PL)", "DPL"]
    assert panels[0].get_ylabel() == "cartoon"
    assert panels[1].texts[0].get_text() == "not run"
    assert panels[3].get_ylabel() == "number of samples"
    assert [text.get_text() for text in panels[3].get_xticklabels()] == ["dog", "cat", "cow"]
    assert [text.get_text() for text in panels[3].get_legend().get_texts()] == ["GT", "CE (PL)", "DPL"]
    assert [bar.get_height() for bar in panels[3].patches[3:6]] == [6, 0, 0]
    assert embeddings.misplaced(counts, "pl") == pytest.approx(100 * 4 / 6)
    assert embeddings.misplaced(counts, "dpl") == 0


def test_figure2_keeps_features_of_the_adapted_network(made, place):
    store = Store(place / "runs")
    kept = {path.name.split(".")[0] for path in (place / "runs" / "figures").glob("*.features.npz")}
    units = {u.key: u for u in store.units()}
    assert {(units[key].method, units[key].domains[0], units[key].seed) for key in kept} == {
        (method, domain, 0) for method in ("source", "pl", "dpl") for domain in ("cartoon", "sketch")
    }
    by_method = {}
    for key in kept:
        with np.load(place / "runs" / "figures" / f"{key}.features.npz") as archive:
            assert archive["label"].tolist() == store.predictions(units[key])["label"].tolist()
            if units[key].domains == ("sketch",):
                by_method[units[key].method] = archive["features"]
    assert not np.array_equal(by_method["source"], by_method["pl"])  # adaptation has changed them


@pytest.mark.parametrize(("what", "kind"), [("fig2", "features"), ("fig3", "styles")])
def test_without_kept_features_or_styles_no_run_says_what_to_do(what, kind, made, place, tmp_path, capsys):
    store = tmp_path / "runs"
    store.mkdir()
    (store / "units").symlink_to(place / "runs" / "units")
    assert call(place, what, tmp_path, "--no-run", "--store", str(store)) == 2
    told = capsys.readouterr().err
    assert f"--no-run: the {kind} of source on pacs/" in told
    assert "leave --no-run out to make them" in told


def test_a_damaged_file_of_features_is_named(made, place, tmp_path, capsys):
    store = tmp_path / "runs"
    (store / "figures").mkdir(parents=True)
    (store / "units").symlink_to(place / "runs" / "units")
    for path in (place / "runs" / "figures").glob("*.features.npz"):
        (store / "figures" / path.name).write_bytes(b"PK not really")
    assert call(place, "fig2", tmp_path, "--no-run", "--store", str(store)) == 2
    assert "remove it to have it made again" in capsys.readouterr().err


def test_figure3_shows_source_domains_then_confident_then_unconfident(made, close):
    distances = data_of(made, "fig3")
    assert list(distances) == ["cartoon", "sketch"]
    assert sum(map(len, distances["sketch"].values())) == 23
    rng = np.random.default_rng(0)
    sources = {name: rng.normal(size=(12, 4)).astype(np.float32) for name in ("photo", "art_painting")}
    target = np.concatenate([rng.normal(size=(5, 4)), rng.normal(9, 1, size=(7, 4))]).astype(np.float32)
    styles = embeddings.on_one_scale({**sources, "confident": target[:5], "unconfident": target[5:]})
    assert embeddings.farther(embeddings.distances(styles)) == 100
    axis = embeddings.draw_styles({"sketch": styles}).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "photo (12)", "art painting (12)", "confident target (5)", "unconfident target (7)"
    ]  # fmt: skip
    assert embeddings.farther({"confident": np.zeros(0), "unconfident": np.ones(3)}) is None


def test_figure4_lines_are_the_stores_accuracies_in_the_papers_order(made, place):
    data = data_of(made, "fig4")
    assert list(data) == ["cartoon", "sketch"]
    assert list(data["cartoon"]) == [f"cartoon {method}" for method in ("tent", "pl", "tsd", "dpl_star", "dpl")]
    for size in (8, 16):
        rows = stored(place, batch_size=size)
        for method in ("tsd", "dpl_star"):
            expected = rows[method, "sketch", 0]["accuracy"]
            assert data["sketch"][f"sketch {method}"][str(size)] == {"0": pytest.approx(expected)}


def test_figure4_axes_and_bands(close):
    line = pd.DataFrame({4: {0: 40.0, 1: 50.0}, 16: {0: 60.0, 1: 70.0}})
    figure = figures.draw_batch_sizes(
        {"pacs": {("pacs", "tent"): line, ("pacs", "dpl"): pd.DataFrame({16: {0: 66.0}})}}, "a note"
    )
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("batch size", "accuracy (%)", "pacs")
    assert [text.get_text() for text in axis.get_xticklabels()] == ["4", "16"]
    assert axis.lines[0].get_xydata().tolist() == [[0, 45], [1, 65]]
    assert axis.lines[1].get_xydata().tolist() == [[1, 66]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["TENT", "DPL"]
    assert len(bands(axis)) == 1
    assert figure.get_supxlabel() == "a note"


def test_several_data_sets_have_a_panel_each_with_the_mean_over_targets(make_row):
    rows = [
        make_row("tent 4", dataset, domain, accuracy, method="tent", batch_size=4)
        for dataset, domain, accuracy in (("pacs", "photo", 50), ("pacs", "sketch", 70), ("vlcs", "SUN09", 20))
    ]
    panels = figures.batch_size_lines(rows)
    assert {group: lines[group, "tent"][4].mean() for group, lines in panels.items()} == {"pacs": 60, "vlcs": 20}


def test_figure5_panels_values_and_styles(made, place, close):
    data = data_of(made, "fig5")
    assert list(data) == ["tau", "eta", "beta", "range"]
    assert sorted(data["range"]) == ["cartoon dpl", "cartoon pl", "sketch dpl", "sketch pl"]
    rows = [r for r in Store(place / "runs").rows(method="pl", batch_size=8) if r["settings"]["scope"] == "affine"]
    for row in rows:
        assert data["range"][f"{row['domains'][0]} pl"]["affine"][str(row["seed"])] == pytest.approx(row["accuracy"])
    lines = {
        ("sketch", "dpl"): pd.DataFrame({"all": {0: 60.0}, "affine": {0: 50.0}}),
        ("sketch", "pl"): pd.DataFrame({"all": {0: 9.0}}),
    }
    tau = {("sketch", "dpl"): pd.DataFrame({1.0: {0: 1.0}, 0.1: {0: 2.0}})}
    figure = figures.draw_sensitivity({"tau": tau, "range": lines})
    assert [axis.get_xlabel()[:3] for axis in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    tau, eta, _, last = figure.axes
    assert [text.get_text() for text in tau.get_xticklabels()] == ["0.1", "1"]
    assert tau.lines[0].get_ydata().tolist() == [2, 1]
    assert eta.texts[0].get_text() == "not run"
    assert tau.get_ylim() == eta.get_ylim()
    assert tau.get_ylim()[1] - tau.get_ylim()[0] == pytest.approx(10)
    assert [text.get_text() for text in last.get_xticklabels()] == ["BN", "all"]
    assert [line.get_linestyle() for line in last.lines] == ["-", "--"]
    assert last.lines[0].get_ydata().tolist() == [50, 60]


def test_a_label_that_belongs_to_no_panel_is_named(place, tmp_path, capsys):
    config = tmp_path / "fig5.yaml"
    config.write_text(HEAD + "methods: {theta 3: {method: dpl, temperature: 3.0}}\n")
    assert call(place, "fig5", tmp_path, "--seeds", "1", "--limit", "8", config=config) == 2
    assert "'theta 3' begins with no panel's name: tau (temperature)" in capsys.readouterr().err


def test_a_half_finished_store_gives_a_partial_figure_with_a_note(made, place, tmp_path, capsys):
    store = tmp_path / "runs" / "units"
    store.mkdir(parents=True)
    for folder in (place / "runs" / "units").iterdir():
        unit = json.loads((folder / "unit.json").read_text())
        if unit["method"] != "tent" and not (unit["method"] == "dpl" and unit["batch_size"] == 8):
            (store / folder.name).symlink_to(folder)
    assert call(place, "fig4", tmp_path, "--no-run", "--store", str(tmp_path / "runs")) == 0
    assert "Partial: 14 of 20 runs" in (tmp_path / "fig4.svg").read_text()
    data = data_of(tmp_path, "fig4")
    assert list(data["sketch"]) == [f"sketch {method}" for method in ("pl", "tsd", "dpl_star", "dpl")]
    assert list(data["sketch"]["sketch dpl"]) == ["16"]
    assert "pacs: tent 8: not run on" in capsys.readouterr().out
    assert "tent 8: not run on" in (tmp_path / "fig4.md").read_text()


@pytest.mark.parametrize("what", ["fig1", "fig2", "fig3", "fig4", "fig5"])
def test_an_empty_store_or_no_data_says_so(what, place, tmp_path, capsys):
    assert call(place, what, tmp_path / "out", "--no-run", "--store", str(tmp_path / "none")) == 2
    assert f"holds no result of {what}" in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    assert main(["reproduce", what, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]) == 2
    assert f"{what}: nothing could be run" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/fig*"))
