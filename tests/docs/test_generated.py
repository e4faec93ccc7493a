"""Generated pages are those that the generator would make now, and the pictures can be drawn."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.pages import DOCS, ROOT
from dpl.core.settings import describe
from dpl.methods import get_method, list_methods
from dpl.methods.settings import GradientSettings

pytest.importorskip("fastapi", reason="needs the serve extra")
pytest.importorskip("jinja2", reason="needs the docs extra")


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tools lie in docs/, beside the pages."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("generate", "pictures", "tools")]:
        del sys.modules[name]


def tool(name: str) -> Any:
    return importlib.import_module(name)


def test_pages_are_up_to_date_and_a_change_is_noticed(tmp_path: Path) -> None:
    generate = tool("generate")
    made = generate.pages()
    assert generate.out_of_date(DOCS, made) == [], "run python docs/generate.py"
    assert generate.write(tmp_path, made) == len(made)
    assert generate.out_of_date(tmp_path, made) == []
    page = tmp_path / "methods" / "tent.md"
    page.write_text(page.read_text().replace("0.001", "0.002"))
    (tmp_path / "methods" / "gone.md").write_text("# A method that is no more")
    assert generate.out_of_date(tmp_path, made) == ["methods/tent.md", "methods/gone.md"]
    generate.write(tmp_path, made)
    assert generate.out_of_date(tmp_path, made) == []


def test_every_method_has_a_page_with_its_own_settings() -> None:
    overview = (DOCS / "methods.md").read_text()
    shared = {name for name, _, _ in describe(GradientSettings)}
    for method in list_methods():
        text = (DOCS / "methods" / f"{method}.md").read_text()
        settings = [name for name, _, _ in describe(get_method(method).settings_class)]
        shown = [name for name in settings if f"\n| `{name}` |" in text]
        assert shown == [name for name in settings if name not in shared], method
        assert f"](methods/{method}.md)" in overview


def test_every_shared_setting_is_explained() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    assert not [name for name, _, meaning in describe(GradientSettings) if f"| `{name}` |" not in text or not meaning]


def test_every_command_has_a_section() -> None:
    commands = importlib.import_module("dpl.cli").COMMANDS
    text = (DOCS / "reference" / "cli.md").read_text()
    assert not [command for command in commands if f"\n## dpl {command}\n" not in text]
    assert "`--batch-size" in text


def test_the_interface_of_the_server_is_complete() -> None:
    text = (DOCS / "reference" / "http.md").read_text()
    for path in ("/v1/streams/{stream_id}/predict", "/v1/server", "/healthz", "/metrics"):
        assert f" {path}`" in text
    assert "| `dpl_storage_ok` |" in text


@pytest.mark.parametrize(
    ("text", "departures"),
    [
        ("X: y.\n\nUpdates: a. Needs: b.\nDepartures from the authors' code: c; d.", "c; d."),
        ("X: y.\n\n    L = z\n\nDepartures:\n    c\n    d.", "c d."),
        ("X: y.\n\nOutput: a. Departures, undone by `authors`: (1) c. (2) d.", "undone by `authors`: (1) c. (2) d."),
    ],
)
def test_docstrings_are_read_in_every_usual_form(text: str, departures: str) -> None:
    found = tool("tools.docstring").read_docstring(text)
    assert (found.name, found.purpose) == ("X", "y.")
    assert found.parts["departures"] == departures


def test_pages_name_the_methods_that_need_views_or_source_data() -> None:
    """The two lists of names that are kept by hand."""
    infos = {name: get_method(name).info for name in list_methods()}
    views = _paragraph("networks-howto.md", "augmented views (")
    assert {name for name, info in infos.items() if info.views} == set(re.findall(r"`([a-z_]+)`", views))
    source = _paragraph("choosing-a-method.md", "once, before the first batch")
    once, always = source.split("once, before the first batch;")
    named = set(re.findall(r"`([a-z_]+)`", once)), set(re.findall(r"`([a-z_]+)` at every step", always))
    assert named == tuple({n for n, info in infos.items() if info.source == when} for when in ("once", "always"))


def _paragraph(page: str, part: str) -> str:
    paragraphs = [" ".join(text.split()) for text in (DOCS / page).read_text().split("\n\n")]
    return next(text for text in paragraphs if part in text)


def test_every_recorded_run_belongs_to_a_method() -> None:
    runs = tool("tools.records").read_parity(DOCS / "results" / "data" / "parity.json")
    assert len(runs) > 50
    assert {run.method for run in runs} <= set(list_methods())


@pytest.mark.parametrize("file", sorted((DOCS / "results" / "data").glob("*.json")), ids=lambda file: file.name)
def test_figures_name_their_origin(file: Path) -> None:
    found = json.loads(file.read_text())
    assert all(found[key] for key in ("command", "commit", "date", "machine"))


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda page: page.stem)
def test_result_pages_say_how_they_were_made(page: Path) -> None:
    text = page.read_text()
    assert "*Measured " in text or "*Computed " in text or "dpl reproduce " in text
    assert not re.search(r"\*\*[\d.]+", text), "a figure in bold needs an interval"


def test_pictures_are_drawn_and_describe_themselves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the docs extra")
    for path in tool("pictures").draw(tmp_path):
        text = path.read_text()
        assert "prefers-color-scheme: dark" in text
        assert "<dc:description>" in text
        assert (DOCS / "images" / path.name).is_file(), "draw it: python docs/pictures.py"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the docs extra")
    pytest.importorskip("mkdocstrings", reason="needs the docs extra")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    front = (site / "index.html").read_text()
    assert "getting-started.html" in front
    assert "assets/iframe-worker.js" in front, "search from disk"
    outside = [part for part in ('src="http', 'rel="stylesheet" href="http') if part in front]
    assert not outside, "the page asks another machine for something"
    assert 'id="dpl.adapt"' in (site / "reference" / "python.html").read_text()
