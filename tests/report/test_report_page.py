"""The page: its figures are those of the store, it needs no other file, and it reports what is missing or damaged."""

import csv
import dataclasses
import errno
import json
import os
import re
import shutil
import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import pytest

from dpl.bench import Store
from dpl.cli import main
from dpl.core.errors import DataError
from dpl.report import default_output, read_runs, write_report
from dpl.report.chart_data import chart_data
from dpl.report.predictions import joined
from dpl.report.summary import costs, shown, signed
from report.runs import TARGETS, adapt, bench, make_adapted, write_guarded, write_many_classes, write_predictions

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


class Cells(HTMLParser):
    """The figures of the accuracy table by method and column."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], str] = {}
        self._method, self._column = "", None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        if tag == "tr":
            self._method = facts.get("data-method", "")
        self._column = facts.get("data-column") if tag == "td" else None

    def handle_data(self, data):
        if self._method and self._column:
            self.found[self._method, self._column] = data.strip()
            self._column = None


def page_of(path: Path, tmp_path: Path, data: Path | None = None) -> str:
    return write_report(read_runs(path, data), tmp_path / "page.html").read_text()


def means(store: Path) -> dict[tuple[str, str], float]:
    """The mean over seeds of each method on each domain, straight from the store."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in Store(store).rows():
        slow = row["method"] == "dpl" and row["settings"]["lr"] == 1e-5
        found.setdefault(("dpl_slow" if slow else row["method"], row["segment"]), []).append(row["accuracy"])
    return {key: fmean(values) for key, values in found.items()}


def test_the_table_shows_the_figures_of_the_store(bench_root, tmp_path):
    cells = Cells(page_of(bench_root / "store", tmp_path)).found
    expected = means(bench_root / "store")
    assert len(expected) == 8
    for key, value in expected.items():
        assert cells[key] == f"{value:.1f}"
    for method in ("source", "tent", "dpl", "dpl_slow"):
        assert cells[method, "average"] == f"{fmean(expected[method, target] for target in TARGETS):.1f}"


def test_the_page_needs_no_other_file(bench_root, tmp_path):
    text = page_of(bench_root / "store", tmp_path)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", text)
    assert not re.findall(r"""url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", text)
    assert not re.findall(r"\son\w+=", text)
    assert "innerHTML" not in text
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 3_000_000


def test_it_says_what_was_run_and_what_it_cost(bench_root, tmp_path):
    text = page_of(bench_root / "store", tmp_path)
    for words in (
        "protocol reset_each_shift",
        "batch size 8",
        "seeds 0, 1",
        "network debug_cnn",
        "torch 2.",
        "lr=0.001",
    ):
        assert words in text
    experiment = read_runs(bench_root / "store")[0].experiments[0]
    by_method = {cost.method: cost for cost in costs(experiment)}
    assert by_method["source"].passes == pytest.approx(1)
    assert by_method["source"].updates == 0
    assert 1.5 < by_method["tent"].passes < 3.5  # forward and the greater part of backward
    assert by_method["tent"].memory > 50
    assert by_method["dpl"].milliseconds > 0


def test_curves_end_at_the_accuracy_and_have_a_band_over_seeds(bench_root):
    experiment = read_runs(bench_root / "store")[0].experiments[0]
    figures = chart_data(experiment)
    expected = means(bench_root / "store")
    for place, stream in enumerate(figures["streams"]):
        for number, method in enumerate(experiment.methods):
            line = figures["lines"][place]["accuracy"][number]
            assert line["mean"][-1] == pytest.approx(expected[method, stream], abs=0.01)
            assert line["low"][-1] <= line["mean"][-1] <= line["high"][-1]
        shares = figures["balance"][place]["truth"]
        assert all(sum(window) == pytest.approx(100, abs=0.2) for window in zip(*shares, strict=True))
    counts = figures["confusion"][0][0]["counts"]
    n = sum(map(sum, counts))
    assert 100 * sum(counts[i][i] for i in range(7)) / n == pytest.approx(expected["source", figures["streams"][0]])


def test_a_page_of_very_many_curves_stays_small(bench_root):
    """Seventy-five corrupted streams and twenty methods: the curves share what a page can carry."""
    small = read_runs(bench_root / "store")[0].experiments[0]
    traces = {(f"m{m}", f"s{s}"): small.traces["tent", "sketch"] for m in range(20) for s in range(75)}
    rows = [dict(small.rows[0]) | {"label": m, "stream": s} for m, s in traces]
    large = dataclasses.replace(small, rows=rows, traces=traces)
    assert len(json.dumps(chart_data(large), separators=(",", ":"))) < 5e6


def test_images_that_changed_are_inside_the_page(bench_root, tmp_path):
    text = page_of(bench_root / "store", tmp_path)
    assert text.count("base64,") > 4
    assert "Images: " not in text


def test_without_the_data_folder_the_page_says_so(bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "copy")
    for plan in (copy / "plans").glob("*.json"):
        plan.write_text(plan.read_text().replace(str(bench_root / "data"), "/nowhere"))
    text = page_of(copy, tmp_path)
    assert "the data folder is not here; name it with --data DIR" in text
    assert "base64," not in text
    assert text.count('data-part="confusion-method"') == 1
    assert "base64," in page_of(copy, tmp_path, bench_root / "data")


def test_another_data_set_is_not_shown_as_that_of_the_run(bench_root, tmp_path):
    from data.make import make_pacs

    make_pacs(tmp_path / "other", per_class=2)
    text = page_of(bench_root / "store", tmp_path, tmp_path / "other")
    assert re.search("Images: .*(could not be read|does not have them)", text)


def test_a_store_without_requests_is_read(bench_root, tmp_path):
    """Without a plan and without what is recorded since: methods are named by their settings."""
    copy = shutil.copytree(bench_root / "store", tmp_path / "old")
    shutil.rmtree(copy / "plans")
    for folder in (copy / "units").iterdir():
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        for line in lines:
            for name in ("gflops_per_image", "peak_bytes", "skipped_because"):
                del line[name]
        rewrite(folder, "results.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    run = read_runs(copy, bench_root / "data")[0]
    assert run.whole
    assert set(run.experiments[0].methods) == {"source", "tent", "dpl (lr=0.001)", "dpl (lr=1e-05)"}
    assert "dpl (lr=1e-05)" in page_of(copy, tmp_path)


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Change a file of a unit and its mark, as if it had been written so."""
    import hashlib

    (folder / name).write_bytes(content)
    marks = json.loads((folder / "done").read_text())
    marks[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "done").write_text(json.dumps(marks))


def test_a_half_finished_run_shows_what_there_is(bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "half")
    for unit in [unit for unit in Store(copy).units() if unit.method != "source"][:6]:
        shutil.rmtree(copy / "units" / unit.key)
    run = read_runs(copy)[0]
    assert run.status.startswith("10 of 16 finished")
    assert not run.whole
    text = page_of(copy, tmp_path)
    assert "not run yet" in text
    assert re.search(r"things? (is|are) missing or damaged", text)
    cells = Cells(text).found
    left = Store(copy).rows(method="source", segment="sketch")
    assert cells["source", "sketch"] == f"{fmean(row['accuracy'] for row in left):.1f}"


def test_a_run_that_has_only_begun_is_called_empty(bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "begun")
    shutil.rmtree(copy / "units")
    run = read_runs(copy)[0]
    assert run.experiments == ()
    assert "no finished result" in page_of(copy, tmp_path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="nothing: holds no result; expected the --out of dpl bench or dpl adapt"):
        read_runs(tmp_path / "nothing")


def test_damage_is_named_and_the_rest_is_shown(bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "damaged")
    first, second, third, fourth = sorted((copy / "units").iterdir())[:4]
    (first / "predictions.npz").write_bytes((first / "predictions.npz").read_bytes()[:100])
    content = bytearray((second / "results.jsonl").read_bytes())
    content[20] ^= 1
    (second / "results.jsonl").write_bytes(content)
    (third / "done").unlink()
    (fourth / "unit.json").unlink()
    (copy / "failures").mkdir()
    (copy / "failures" / "0123.json").write_text(
        json.dumps({"unit": "dpl on pacs/photo", "reason": "no <b>memory</b>"})
    )
    (copy / "failures" / "4567.json").write_text(
        json.dumps({"unit": "tent on pacs/photo", "reason": "no <b>memory</b>"})
    )
    (copy / "units" / ".abc.1.tmp").mkdir()
    run = read_runs(copy)[0]
    text = " ".join(f"{item.subject}: {item.text}" for item in run.problems)
    assert "100 bytes instead of" in text
    assert "its figures are shown, its curves and images cannot be" in text
    assert "other checksum" in text
    assert "the mark of completion is missing" in text
    assert "unit.json: cannot be read" in text
    assert "dpl on pacs/photo, tent on pacs/photo: failed: no <b>memory</b> (2 times)" in text
    assert "a draft" in text
    assert "13 of 16 finished" in run.status
    page = page_of(copy, tmp_path)
    assert "no &lt;b&gt;memory&lt;/b&gt;" in page
    assert len(Cells(page).found) >= 8


def test_a_plan_that_cannot_be_read_costs_nothing_but_itself(bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "plan")
    next((copy / "plans").iterdir()).write_text("{")
    run = read_runs(copy)[0]
    assert len(run.experiments[0].methods) == 4
    assert "not a readable plan" in run.problems[0].text


def test_an_unlabelled_folder_has_everything_but_accuracy(adapted, tmp_path):
    run = read_runs(adapted)[0]
    experiment = run.experiments[0]
    assert run.whole
    assert run.status == "60 of 60 images predicted"
    assert not experiment.labelled
    assert experiment.methods == ("source", "dpl")
    assert experiment.classes == ("circle", "square", "triangle")
    assert not experiment.guarded
    text = page_of(adapted, tmp_path)
    assert "Same prediction as the source model %" in text
    assert "Balance of classes" in text
    assert 'data-part="accuracy"' not in text
    assert "base64," in text
    assert "guard off" in text
    by_method = {cost.method: cost for cost in costs(experiment)}
    assert by_method["dpl"].batches == 8
    assert by_method["dpl"].passes > 1


def test_a_folder_with_labels_has_accuracy_too(tmp_path):
    out = make_adapted(tmp_path, flat=False)
    experiment = read_runs(out.parent)[0].experiments[0]
    assert experiment.guarded
    result = json.loads(out.with_suffix(".run.json").read_text())["result"]
    assert experiment.rows[0]["accuracy"] == pytest.approx(100 * result["correct"] / result["labelled"])
    cells = Cells(page_of(out, tmp_path)).found
    assert cells["dpl", "mine"] == f"{experiment.rows[0]['accuracy']:.1f}"


def test_a_predictions_file_without_its_record_and_with_a_torn_line(adapted, tmp_path):
    lines = adapted.read_text().splitlines()
    (tmp_path / "p.csv").write_text("\n".join([*lines[:30], lines[30][:9]]))
    run = read_runs(tmp_path / "p.csv")[0]
    words = " ".join(item.text for item in run.problems)
    assert "no record of how these were made" in words
    assert "1 of 30 lines cannot be read" in words
    assert run.status == "29 images predicted"
    assert "Confidence" in page_of(tmp_path / "p.csv", tmp_path)


def test_a_stopped_folder_run_names_what_is_left(adapted, tmp_path):
    lines = adapted.read_text().splitlines()
    (tmp_path / "p.csv").write_text("\n".join(lines[:41]) + "\n")
    record = json.loads(adapted.with_suffix(".run.json").read_text())
    record["guard"] = True
    record["events"] = [{"batch": 3, "action": "freeze", "reason": "<i>lost</i>", "alarm": True}]
    (tmp_path / "p.run.json").write_text(json.dumps(record))
    text = page_of(tmp_path / "p.csv", tmp_path)
    assert "20 of 60 images were not reached" in text
    assert "freeze" in text
    assert "&lt;i&gt;lost&lt;/i&gt;" in text


def test_a_file_without_predictions_is_named(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert "not a predictions file" in page_of(tmp_path / "x.csv", tmp_path)
    (tmp_path / "y.csv").write_text("")
    assert "not a predictions file" in page_of(tmp_path / "y.csv", tmp_path)
    with pytest.raises(DataError, match="there is no such folder or file"):
        read_runs(tmp_path / "absent")


def test_names_from_data_stay_text(tmp_path):
    """A class or file may be called anything."""
    evil = "</script><img src=x onerror=alert(1)>"
    (tmp_path / "p.csv").write_text(f"image,predicted,name,confidence,label\n{evil}.png,0,{evil},0.5,{evil}\n" * 1)
    text = page_of(tmp_path / "p.csv", tmp_path)
    assert "<img src=x" not in text
    assert text.count("<script") == text.count("</script>") == 2


def test_the_command_writes_beside_the_run_and_says_where(bench_root, adapted, tmp_path, capsys, monkeypatch):
    copy = shutil.copytree(bench_root / "store", tmp_path / "store")
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").is_file()
    (tmp_path / "reproduced").mkdir()
    shutil.copytree(copy, tmp_path / "reproduced" / "runs")
    assert read_runs(tmp_path / "reproduced")[0].whole
    assert str(copy / "report.html") in capsys.readouterr().out
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["report", str(copy), str(adapted), "--out", str(tmp_path / "both.html"), "--open", "--json"]) == 0
    assert opened == [(tmp_path / "both.html").as_uri()]
    told = json.loads(capsys.readouterr().out)
    assert [run["whole"] for run in told["runs"]] == [True, True]
    assert "dpl on mine" in (tmp_path / "both.html").read_text()
    assert default_output([copy, adapted]) == Path("report.html")
    assert default_output([adapted]) == adapted.with_suffix(".html")


def test_wrong_paths_end_in_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "no such folder or file" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--data", str(tmp_path / "absent")]) == 2
    assert "--data" in capsys.readouterr().err


def test_running_again_keeps_one_plan(bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "again")
    assert bench(bench_root, copy) == 0
    assert len(list((copy / "plans").iterdir())) == 1
    assert bench(bench_root, copy, "--only", "method=dpl") == 0
    assert len(list((copy / "plans").iterdir())) == 2
    assert read_runs(copy)[0].status == "16 of 16 finished"


@pytest.mark.parametrize(("right", "figure"), [(117, "29.2"), (119, "29.8"), (60, "15.0")])
def test_table_and_curve_show_the_same_rounding(tmp_path, right, figure):
    """117 of 400 are 29.25 %, where rounding half up and half to even differ."""
    file = write_predictions(tmp_path, right, right, 400)
    experiment = read_runs(file)[0].experiments[0]
    assert Cells(page_of(file, tmp_path)).found["dpl", "p"] == figure
    figures = chart_data(experiment)
    end = figures["lines"][0]["accuracy"][1]["mean"][-1]
    assert abs(end - float(figure)) < 0.045  # the script's rounding to one decimal cannot turn it into another figure
    assert figures["by_domain"][1][0]["after"] == float(figure)


@pytest.mark.parametrize(
    ("right", "gain", "tone"),
    [(5000, "+0.0", ""), (5001, "+0.0", ""), (4999, "+0.0", ""), (5010, "+0.1", "good"), (4990, "-0.1", "bad")],
)
def test_a_gain_that_is_shown_as_zero_has_no_colour(tmp_path, right, gain, tone):
    file = write_predictions(tmp_path, right, 5000, 10_000)
    cell = re.search(r'<td data-value="[^"]*" class="(good|bad|)">([+-][0-9.]+)</td>', page_of(file, tmp_path))
    assert (cell[2], cell[1]) == (gain, tone)
    assert chart_data(read_runs(file)[0].experiments[0])["by_domain"][1][0]["gain"] == float(gain)


def test_a_negative_zero_is_shown_as_zero():
    assert signed(-0.04) == "+0.0"
    assert str(shown(-0.0)) == "0.0"


def test_a_full_disk_is_reported_with_the_path_and_leaves_nothing(adapted, tmp_path, monkeypatch, capsys):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = tmp_path / "new" / "page.html"
    monkeypatch.setattr(os, "fsync", full)
    assert main(["report", str(adapted), "--out", str(page)]) == 2
    error = capsys.readouterr().err
    assert "No space left on device on the disk at /" in error
    assert str(page) in error
    assert list(page.parent.iterdir()) == []


def test_a_folder_of_images_is_no_run(adapted, tmp_path, capsys):
    images = tmp_path / "photos"
    shutil.copytree(adapted.parent.parent / "mine", images)
    before = sorted(images.rglob("*"))
    assert main(["report", str(images)]) == 2
    assert "photos: holds no result" in capsys.readouterr().err
    assert sorted(images.rglob("*")) == before


def test_no_page_is_written_beside_images(adapted, tmp_path, capsys):
    images = tmp_path / "photos"
    shutil.copytree(adapted.parent.parent / "mine", images)
    before = sorted(images.rglob("*"))
    for out in (images, images / "page.html"):
        assert main(["report", str(adapted), "--out", str(out)]) == 2
        assert "name another place for the page with --out FILE" in capsys.readouterr().err
    assert sorted(images.rglob("*")) == before


def test_the_accuracies_are_written_for_papers(bench_root, tmp_path, capsys):
    copy = shutil.copytree(bench_root / "store", tmp_path / "store")
    assert main(["report", str(copy), "--latex", "--csv", "--png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == [str(copy / f"report.{s}") for s in ("tex", "csv", "png")]
    rows = Store(copy).rows(method="tent", segment="sketch")
    mean, deviation = fmean(row["accuracy"] for row in rows), stdev(row["accuracy"] for row in rows)
    lines = list(csv.DictReader((copy / "report.csv").open()))
    assert len(lines) == 4 * 2 * 2  # methods, streams, seeds
    found = [line for line in lines if (line["method"], line["stream"]) == ("tent", "sketch")]
    assert [float(line["accuracy"]) for line in found] == pytest.approx([row["accuracy"] for row in rows])
    assert [line["seed"] for line in found] == ["0", "1"]
    text = (copy / "report.tex").read_text()
    assert rf"{mean:.1f} $\pm$ {deviation:.1f}" in text
    assert r"art\_painting" in text
    assert text.count(r"\toprule") == 1
    assert (copy / "report.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(copy)]) == 0  # the picture beside the page does not hinder the next one
    (copy / "photo.png").write_bytes(b"")
    assert main(["report", str(copy)]) == 2


def test_without_labels_there_is_no_table_for_papers(adapted, tmp_path, capsys):
    assert main(["report", str(adapted), "--csv", "--out", str(tmp_path / "page.html")]) == 2
    assert "the run has no accuracy" in capsys.readouterr().err


def test_runs_over_one_folder_share_a_table_and_a_chart(tmp_path, capsys):
    make_adapted(tmp_path, "--with-source", flat=False)
    adapt(tmp_path, "slow", "--method", "dpl", "--set", "confidence=0.2", "--set", "lr=1e-6")
    adapt(tmp_path, "tent", "--method", "tent", "--seed", "1")
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "out"), "--out", str(page), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 3
    text = page.read_text()
    assert text.count("<article") == 1
    assert "3 runs on mine" in text
    names = list(dict.fromkeys(method for method, _ in Cells(text).found))
    assert names[0] == "source"
    assert "tent" in names
    assert [name for name in names if name.startswith("dpl (lr=")][1] == "dpl (lr=1e-06)"
    (run,) = joined(read_runs(tmp_path / "out"))
    assert len(chart_data(run.experiments[0])["lines"][0]["accuracy"]) == 4
    tent, source = (run.experiments[0].first(name, "mine") for name in ("tent", "source"))
    assert tent.image.tolist() != source.image.tolist()  # the order of arrival differs, the images are the same
    by_image = {record.image: (record.label, record.prediction) for record in source}
    assert [by_image[record.image] for record in tent] == [(record.label, record.source) for record in tent]


def test_other_networks_or_folders_are_not_joined(adapted, tmp_path):
    runs = [*read_runs(adapted), *read_runs(write_predictions(tmp_path, 5, 5, 10))]
    assert joined(runs) == runs
    record = json.loads(adapted.with_suffix(".run.json").read_text())
    (tmp_path / "other.csv").write_text(adapted.read_text())
    (tmp_path / "other.run.json").write_text(json.dumps(record | {"network": "another"}))
    assert len(joined([*read_runs(adapted), *read_runs(tmp_path / "other.csv")])) == 2


def test_actions_of_the_guard_are_marked_where_they_were_taken(tmp_path):
    file = write_guarded(tmp_path)
    marks = chart_data(read_runs(file)[0].experiments[0])["events"]
    assert [(mark["method"], mark["seen"], mark["alarm"]) for mark in marks] == [(1, 24, False), (1, 72, True)]
    assert marks[0]["text"] == "batch 3: roll_back: lost"
    assert "rings: actions of the guard" in page_of(file, tmp_path)


def test_many_classes_have_a_compact_form(tmp_path):
    file = write_many_classes(tmp_path)
    figures = chart_data(read_runs(file)[0].experiments[0])
    coloured = figures["balance"][0]["classes"]
    assert len(coloured) == 10
    assert 42 in coloured  # the most frequent prediction
    assert sum(700 <= number < 710 for number in coloured) >= 5  # those that are not predicted any more
    mistakes = figures["confusion"][0][1]["mistakes"]
    assert sorted(mistakes) == [[number, 42, 2] for number in range(700, 710)]
    assert {row["name"] for row in figures["by_class"][0][1]} >= {f"class {number}" for number in range(700, 710)}
    assert len(page_of(file, tmp_path)) < 500_000


def test_images_skipped_for_one_reason_are_told_once(tmp_path):
    file = write_predictions(tmp_path, 5, 5, 10)
    record = json.loads(file.with_suffix(".run.json").read_text())
    failed = [[f"a/{number}.png", "not an image"] for number in range(7)]
    file.with_suffix(".run.json").write_text(json.dumps(record | {"total": 17, "result": {"failed": failed}}))
    (item,) = read_runs(file)[0].problems
    assert item.subject == "0.png, 1.png, 2.png, 3.png, 4.png and 2 more"
    assert item.text == "skipped: not an image (7 times)"
