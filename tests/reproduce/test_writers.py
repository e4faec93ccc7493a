"""Markdown and LaTeX: figures, marks, footnotes, missing cells, and text that a format could misread."""

import json
import re
from pathlib import Path

import pytest

from dpl.reproduce import paper
from dpl.reproduce.compare import compare
from dpl.reproduce.document import Document, Item, render, write
from dpl.reproduce.plan import Request
from dpl.reproduce.targets import make_document

NASTY = "a|b *c* _d_ <script>alert(1)</script> 5 % of $x & {y} #z ~t ^u \\v -> w"


@pytest.fixture
def rows(make_row):
    """PACS alone: PL on all four domains with two seeds, DPL on three with one, and a method of one's own."""
    found = [
        make_row("pl", "pacs", domain, 80.0 + seed, seed=seed)
        for domain in ("art_painting", "cartoon", "photo", "sketch")
        for seed in (0, 1)
    ]
    found += [make_row("dpl_dagger", "pacs", domain, 90.0) for domain in ("art_painting", "cartoon", "photo")]
    return found + [make_row("my_own", "pacs", d, 70.0) for d in ("art_painting", "cartoon", "photo", "sketch")]


@pytest.fixture
def document(rows):
    layout = "  VLCS/\n    Caltech101/\n      bird/*.jpg"
    missing = [Item("vlcs", f"DATA: VLCS was not found here; expected layout:\n{layout}"), Item("tent", NASTY)]
    request = Request(data=Path("d"), weights=Path("w"), out=Path("o"), store=Path("s"), command="dpl reproduce table1")
    return make_document(paper.load("table1"), rows, missing, request)


def lines_of(text, word):
    return [line for line in text.splitlines() if word in line]


def test_markdown_shows_both_lines_of_a_method(document):
    text = render(document, "md")
    lines = text.splitlines()
    place = lines.index("| pl | measured | **80.5** ± 0.71 | – | – | – | **80.5** ± 0.71 (4/16) |")
    assert lines[place + 1] == "|  | reported | 82.9 ± 0.96 | 74.5 ± 0.74 | 62.4 ± 0.68 | 42.6 ± 0.78 | 65.6 |"
    assert "| dpl\\_dagger (Ours) | measured | 90.0 (3/4, 300 images) | – | – | – | 90.0 (3/16, 300 images) |" in lines
    assert "| my\\_own | measured | _70.0_ | – | – | – | _70.0_ (4/16) |" in lines
    assert "| images | each seed | 400 | – | – | – | 400 |" in lines


def test_markdown_rows_all_have_the_same_number_of_cells(document):
    table = [line for line in render(document, "md").splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {8}


def test_markdown_flags_the_misprint_and_draws_the_layout(document):
    text = render(document, "md")
    assert "71.3 <sup>a</sup>" in text
    assert "<sup>a</sup> Misprint in the paper (swr\\_nsp, average): the four cells give 71.15" in text
    assert "\n  ```text\n    VLCS/\n      Caltech101/\n" in text


def test_markdown_escapes(document):
    line = next(iter(lines_of(render(document, "md"), "alert")))
    assert "\\<script\\>" in line
    assert "a\\|b \\*c\\* \\_d\\_" in line
    assert "→ w" in line


def test_latex_rows_all_have_the_same_number_of_cells(document):
    text = render(document, "tex")
    body = text[text.index(r"\begin{tabular}{llrrrrr}") : text.index(r"\end{tabular}")]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in rows} == {6}
    assert len(rows) == 2 * 16 + 1 + 2  # sixteen methods of the paper, one's own, a heading, the counts


def test_latex_shows_figures_marks_and_footnotes(document):
    text = render(document, "tex")
    assert r"\texttt{pl} & measured & \textbf{80.5}$\pm$0.71 & -- & -- & -- & \textbf{80.5}$\pm$0.71 (4/16) \\" in text
    assert r"\texttt{dpl\_dagger} (Ours) & measured & 90.0 (3/4, 300 images)" in text
    assert r"\textbf{89.9}$\pm$0.39" in text
    assert r"71.3\textsuperscript{a}" in text
    assert r"\textsuperscript{a} Misprint in the paper (swr\_nsp, average)" in text
    assert r"\\\hspace*{2em}\texttt{Caltech101/}" in text


def test_latex_escapes_and_balances(document):
    text = render(document, "tex")
    line = next(iter(lines_of(text, "alert")))
    expected = (
        r"a$|$b *c* \_d\_ $<$script$>$alert(1)$<$/script$>$ 5 \% of \$x \& \{y\} \#z \textasciitilde{}t "
        r"\textasciicircum{}u \textbackslash{}v $\rightarrow$ w"
    )
    assert expected in line
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    begun, ended = re.findall(r"\\begin\{(\w+\*?)\}", text), re.findall(r"\\end\{(\w+\*?)\}", text)
    assert sorted(begun) == sorted(ended)
    assert not re.search(r"[^\x00-\x7f]", text)


@pytest.mark.parametrize("suffix", ["md", "tex"])
def test_every_format_tells_how_the_figures_came_about(document, suffix):
    text = render(document, suffix).replace("\\", "")
    for words in (
        "What is missing", "What differs from the paper", "Settings were fixed; the paper chose them",
        "Protocol", "80% training split", "seeds 0, 1", "batch size 32", "network resnet50", "SHA-256 0123456789ab",
        "The paper's protocol", "method dpl_dagger; lr=5e-05", "torch 2.13.0", "dpl reproduce table1",
        "tast", "Copied by the paper from the method",
    ):  # fmt: skip
        assert words in text


def test_the_oracle_follows_as_a_second_table(rows):
    found = [row | {"oracle_accuracy": 95.0} for row in rows]
    request = Request(data=Path("d"), weights=Path("w"), out=Path("o"), store=Path("s"))
    text = render(make_document(paper.load("table1"), found, [], request), "md")
    assert text.count("| method |") == 2
    assert (
        "## Domain generalisation benchmarks, ResNet-50: with the settings that are best on the target (oracle)" in text
    )


def test_three_files_are_written_and_the_json_has_every_figure(document, tmp_path):
    files = write(document, tmp_path / "new" / "folder")
    assert [path.name for path in files] == ["table1.md", "table1.tex", "table1.json"]
    assert sorted(p.name for p in files[0].parent.iterdir()) == sorted(p.name for p in files)
    grid = json.loads(files[2].read_text())["grids"][0]
    row = next(row for row in grid["rows"] if row["name"] == "dpl_dagger")
    assert row["measured"][0]["parts"] == 3
    assert row["reported"][0]["deviation"] == 0.39


def test_a_document_without_lists_has_no_empty_headings():
    grid = compare(paper.load("table8"), [])
    text = render(Document(name="table8", title="T", grids=(grid,)), "md")
    assert "##" not in text


def test_folders_of_the_machine_do_not_get_into_what_is_written():
    request = Request(data=Path("/a/b"), weights=Path("/a/b/c"), out=Path("out"), store=Path("out/runs"))
    assert (
        request.anonymous("/a/b/c/x.pt, /a/b: nothing, /a/bc, out/runs")
        == "WEIGHTS/x.pt, DATA: nothing, /a/bc, out/runs"
    )
