"""Generated pages are those that the generator would make now, and the pictures can be drawn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import DOCS, ROOT
from dpl.core.settings import describe
from dpl.methods import get_method, list_methods


def test_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_method_has_a_page_with_all_settings() -> None:
    overview = (DOCS / "methods.md").read_text()
    for method in list_methods():
        text = (DOCS / "methods" / f"{method}.md").read_text()
        missing = [name for name, _, _ in describe(get_method(method).settings_class) if f"| `{name}` |" not in text]
        assert not missing, f"{method}: {missing}"
        assert f"](methods/{method}.md)" in overview


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
    return next(text for text in (DOCS / page).read_text().split("\n\n") if part in text)


def test_a_change_is_noticed(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS))
    try:
        import generate
    finally:
        sys.path.remove(str(DOCS))
    copy = tmp_path / "docs"
    (copy / "results").mkdir(parents=True)
    (copy / "methods.md").write_text((DOCS / "methods.md").read_text())
    (copy / "results" / "all_methods.md").write_text((DOCS / "results" / "all_methods.md").read_text())
    assert generate.write(copy) >= len(list_methods())
    assert generate.out_of_date(copy) == []
    page = copy / "methods" / "tent.md"
    page.write_text(page.read_text().replace("0.001", "0.002"))
    (copy / "methods" / "gone.md").write_text("# A method that is no more")
    assert set(generate.out_of_date(copy)) == {"methods/tent.md", "methods/gone.md"}
    generate.write(copy)
    assert generate.out_of_date(copy) == []


def test_every_trace_belongs_to_a_method() -> None:
    sys.path.insert(0, str(DOCS))
    try:
        from tools.records import parity
    finally:
        sys.path.remove(str(DOCS))
    traces = parity((DOCS / "methods.md").read_text())
    assert len(traces) > 50
    assert {trace.method for trace in traces} <= set(list_methods())


def test_pictures_are_drawn_and_describe_themselves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the docs extra")
    sys.path.insert(0, str(DOCS))
    try:
        import pictures
    finally:
        sys.path.remove(str(DOCS))
    for path in pictures.draw(tmp_path):
        text = path.read_text()
        assert "prefers-color-scheme: dark" in text
        assert "<dc:description>" in text
        assert (DOCS / "images" / path.name).is_file(), "draw it: python docs/pictures.py"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the docs extra")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site" / "index.html").read_text()
    assert "getting-started.html" in front
    outside = [part for part in ('src="http', 'rel="stylesheet" href="http') if part in front]
    assert not outside, "the page asks another machine for something"
