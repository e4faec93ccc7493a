"""The page in a real browser: drawn without complaint at every width, by pointer and by keyboard, light and dark."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from dpl.bench import Store
from dpl.report import read_runs, write_report
from report.runs import write_guarded, write_many_classes, write_predictions
from serve.browser import Browser, open_browser

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")

KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "Escape": 27, " ": 32}


@pytest.fixture(scope="module")
def browser():
    with open_browser() as running:
        yield running


@pytest.fixture(scope="module")
def page(bench_root, tmp_path_factory) -> Path:
    return write_report(read_runs(bench_root / "store"), tmp_path_factory.mktemp("page") / "report.html")


def visit(browser: Browser, page: Path, width: int = 1600, scheme: str = "light") -> None:
    browser.requests.clear()
    browser.complaints.clear()
    browser.resize(width, 900)
    browser.dress(scheme)
    browser.open(page.as_uri())
    browser.wait("document.documentElement.dataset.ready === 'yes'")


def press(browser: Browser, key: str) -> None:
    facts = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **facts, **({"text": " "} if key == " " else {}))
    browser.call("Input.dispatchKeyEvent", type="keyUp", **facts)


def lines(browser: Browser, part: str = "accuracy") -> list[str]:
    return browser.value(f"[...document.querySelectorAll('[data-part={part}] polyline')].map(l => l.dataset.method)")


def fits(browser: Browser) -> bool:
    """Whether nothing makes the page as a whole wider than its window."""
    return browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_it_is_drawn_at_every_width_without_complaint(browser, page, width, scheme):
    visit(browser, page, width, scheme)
    assert browser.complaints == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data"}
    assert fits(browser)
    assert sorted(lines(browser)) == ["dpl", "dpl_slow", "source", "tent"]
    assert len(lines(browser, "confidence")) == 4
    assert len(lines(browser, "agreement")) == 3  # the source agrees with itself
    boxes = browser.value("[...document.querySelectorAll('.chart > svg')].map(s => s.getBoundingClientRect().width)")
    assert len(boxes) >= 8
    assert all(200 < box <= width for box in boxes)
    back = browser.value("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, back.removeprefix("rgb(").removesuffix(")").split(","))) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    assert browser.picture().startswith(b"\x89PNG")


def test_the_drawn_table_has_the_figures_of_the_store(browser, page, bench_root):
    visit(browser, page)
    shown = browser.value(
        "Object.fromEntries([...document.querySelectorAll('.accuracy tr[data-method]')].map(r => [r.dataset.method,"
        " Object.fromEntries([...r.querySelectorAll('[data-column]')].map(c => [c.dataset.column, c.innerText]))]))"
    )
    for method in ("source", "tent"):
        for target in ("art_painting", "sketch"):
            rows = Store(bench_root / "store").rows(method=method, segment=target)
            assert shown[method][target].startswith(f"{fmean(row['accuracy'] for row in rows):.1f}")
    assert shown["source"]["average"]


def test_a_curve_ends_where_the_table_says(browser, page):
    visit(browser, page)
    browser.value("document.querySelector('[data-part=accuracy] svg').focus()")
    press(browser, "ArrowRight")
    tip = browser.value("document.querySelector('[data-part=accuracy] .tip').innerText")
    figure = browser.value("document.querySelector('tr[data-method=tent] [data-column=art_painting]').dataset.value")
    assert f"{float(figure):.1f} %" in tip
    spoken = browser.value("document.querySelector('[data-part=accuracy] [aria-live]').innerText")
    assert "tent" in spoken
    press(browser, "Home")
    assert browser.value("document.querySelector('[data-part=accuracy] .tip').innerText") != tip
    press(browser, "Escape")
    assert browser.value("document.querySelector('[data-part=accuracy] .tip').hidden")


def test_a_curve_is_rounded_as_the_table_is(browser, tmp_path):
    """29.25 %: Python rounds half to even, the script half up."""
    visit(browser, write_report(read_runs(write_predictions(tmp_path, 117, 118, 400)), tmp_path / "page.html"))
    browser.value("document.querySelector('[data-part=accuracy] svg').focus()")
    press(browser, "ArrowRight")
    tip = browser.value("document.querySelector('[data-part=accuracy] .tip').innerText")
    table = browser.value("document.querySelector('tr[data-method=dpl] [data-column]').innerText")
    assert table == "29.2"
    assert "29.2 %" in tip
    assert "29.3" not in tip


def test_the_pointer_reads_values_too(browser, page):
    visit(browser, page)
    browser.value(
        "document.querySelector('[data-part=accuracy] svg').scrollIntoView({behavior: 'instant', block: 'center'})"
    )
    box = browser.value(
        "(r => [r.left + r.width / 2, r.top + r.height / 2])(document.querySelector('[data-part=accuracy] svg')"
        ".getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    browser.wait("!document.querySelector('[data-part=accuracy] .tip').hidden", 10)
    assert "images" in browser.value("document.querySelector('[data-part=accuracy] .tip').innerText")


def test_every_control_is_reached_by_keyboard(browser, page):
    visit(browser, page)
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.value("(e => e.dataset.part || e.type || e.tagName.toLowerCase())(document.activeElement)"))
        outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or browser.value("document.activeElement.matches('.legend input, body')")
    assert {"stream", "method", "checkbox", "button", "svg", "summary", "a"} <= reached


def choose(browser: Browser, part: str, number: int) -> None:
    browser.value(
        f"(s => {{ s.value = '{number}'; s.dispatchEvent(new Event('change')); }})"
        f"(document.querySelector('[data-part={part}]'))"
    )


def test_choosing_another_stream_and_method_redraws_everything(browser, page):
    visit(browser, page)
    before = browser.value("document.querySelector('[data-part=confusion-method]').innerText")
    curve = browser.value("document.querySelector('[data-part=accuracy] polyline').getAttribute('points')")
    choose(browser, "stream", 1)
    choose(browser, "method", 1)
    assert browser.value("document.querySelector('[data-name=stream]').innerText") == "sketch"
    assert browser.value("document.querySelector('[data-part=confusion-method]').innerText") != before
    assert browser.value("document.querySelector('[data-part=accuracy] polyline').getAttribute('points')") != curve
    assert browser.value("document.querySelector('polyline.chosen').dataset.method") == "tent"
    assert browser.complaints == []


def test_a_line_is_taken_away_and_a_column_sorted_by_keyboard(browser, page):
    visit(browser, page)
    browser.value("document.querySelector('.legend input').focus()")
    press(browser, " ")
    assert "source" not in lines(browser)
    order = "[...document.querySelectorAll('.accuracy tbody tr')].map(r => Number(r.querySelector('td').dataset.value))"
    browser.value("document.querySelectorAll('table.accuracy thead button')[1].focus()")
    browser.press("Enter")
    assert browser.value(order) == sorted(browser.value(order), reverse=True)
    browser.press("Enter")
    assert browser.value(order) == sorted(browser.value(order))
    assert browser.value("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"


def test_pictures_have_words(browser, page):
    visit(browser, page)
    choose(browser, "method", 1)  # tent, which changes many answers
    browser.wait("[...document.querySelectorAll('.pictures img')].some(i => i.complete)", 10)
    assert browser.value("[...document.querySelectorAll('.pictures img')].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.value("[...document.querySelectorAll('img')].every(i => i.alt.includes('predicts'))")
    assert browser.value(
        "[...document.querySelectorAll('.chart > svg')].every(s => s.getAttribute('aria-label').length > 20)"
    )


def test_an_unlabelled_folder_is_drawn(browser, adapted, tmp_path):
    page = write_report(read_runs(adapted), tmp_path / "folder.html")
    for width in (400, 1600):
        visit(browser, page, width)
        assert browser.complaints == []
        assert fits(browser)
        assert lines(browser, "confidence") == ["dpl"]
        assert lines(browser, "agreement") == ["dpl"]
        assert browser.value("document.querySelectorAll('[data-part=balance-method] polygon').length") == 3
        assert browser.value("document.querySelector('[data-part=accuracy]')") is None


def test_damaged_half_finished_and_empty_runs_open_too(browser, bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "damaged")
    folders = sorted((copy / "units").iterdir())
    for folder in folders[:3]:
        (folder / "predictions.npz").write_bytes(b"nothing")
    shutil.rmtree(folders[3])
    (tmp_path / "empty" / "units").mkdir(parents=True)
    page = write_report([*read_runs(copy), *read_runs(tmp_path / "empty")], tmp_path / "page.html")
    visit(browser, page, 400)
    assert browser.complaints == []
    assert fits(browser)
    text = browser.value("document.body.innerText")
    assert "15 of 16 finished" in text
    assert "7 bytes instead of" in text
    assert "nothing to draw" in text
    assert len(lines(browser)) >= 1


def test_every_prediction_lost_still_leaves_the_table(browser, bench_root, tmp_path):
    copy = shutil.copytree(bench_root / "store", tmp_path / "lost")
    for folder in (copy / "units").iterdir():
        (folder / "predictions.npz").unlink()
    visit(browser, write_report(read_runs(copy), tmp_path / "page.html"))
    assert browser.complaints == []
    assert browser.value("document.querySelectorAll('table.accuracy tbody tr').length") == 4
    assert "Nothing to draw here" in browser.value("document.body.innerText")


def test_hostile_names_are_shown_and_not_run(browser, tmp_path):
    evil = "</script><img src=x onerror=document.title='broken'>"
    rows = "".join(f"{evil}{i}.png,{i % 2},{evil if i % 2 else 'b'},0.5,,{i % 2}\n" for i in range(64))
    (tmp_path / "p.csv").write_text(f"image,predicted,name,confidence,label,source\n{rows}")
    (tmp_path / "p.run.json").write_text(
        json.dumps({"method": evil, "images": evil, "classes": [evil, "<b>"], "total": 64})
    )
    visit(browser, write_report(read_runs(tmp_path / "p.csv"), tmp_path / "page.html"), 400)
    assert browser.complaints == []
    assert fits(browser)
    assert browser.value("document.title") != "broken"
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert "onerror" in browser.value("document.body.innerText")


def test_actions_of_the_guard_are_rings_on_the_curve(browser, tmp_path):
    file = write_guarded(tmp_path)
    visit(browser, write_report(read_runs(file), tmp_path / "page.html"))
    rings = "[...document.querySelectorAll('[data-part=accuracy] circle.event')]"
    assert browser.value(f"{rings}.map(r => r.textContent)") == ["batch 3: roll_back: lost", "batch 9: freeze: lost"]
    assert browser.value(f"{rings}.map(r => r.matches('.alarm'))") == [False, True]
    left, right = browser.value(f"{rings}.map(r => Number(r.getAttribute('cx')))")
    assert left < right


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_stands_beside_an_empty_half_with_many_classes(browser, tmp_path, width):
    visit(browser, write_report(read_runs(write_many_classes(tmp_path)), tmp_path / "page.html"), width)
    assert browser.complaints == []
    assert fits(browser)
    card = "document.querySelector('[data-part=confusion-method]').closest('.card').clientWidth"
    assert browser.value("document.querySelector('.mistakes').getBoundingClientRect().width") > 0.8 * browser.value(
        card
    )
    assert browser.value("document.querySelectorAll('.mistakes tbody tr').length") == 10
    assert browser.value("document.querySelectorAll('[data-part=balance-key] span').length") == 11
    by_class = "document.querySelector('[data-part=by-class]').getBoundingClientRect().width"
    assert browser.value(by_class) > 0.8 * browser.value(card)
