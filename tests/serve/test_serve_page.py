"""The page: one file, nothing from elsewhere, live, and usable by keyboard alone."""

import re
from pathlib import Path

import pytest
from browser import Browser, open_browser
from live import batch, live, raw

from dpl.serve.middleware import Tokens

SECRET = "a-long-enough-secret"
INSIDE = "(b) => b.getBoundingClientRect().right <= document.querySelector('.scroll').getBoundingClientRect().right"


@pytest.mark.parametrize("name", ["page.html", "docs.html"])
def test_a_page_is_one_file(name: str) -> None:
    import dpl.serve

    text = (Path(dpl.serve.__file__).parent / name).read_text()
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", text)
    assert "prefers-color-scheme: dark" in text
    assert "innerHTML" not in text  # names and reasons come from outside: shown as text, never as markup
    assert not re.findall(r"\son\w+=", text)


def test_the_policy_allows_the_pages_own_script_alone(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        for path in ("/", "/docs"):
            answer = server.http.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'sha256-" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-frame-options"] == "DENY"


@pytest.fixture
def browser():
    with open_browser() as running:
        yield running


def tab_to(browser: Browser, label: str) -> None:
    """Press Tab until the control with this label has the focus."""
    for _ in range(40):
        browser.press("Tab")
        if (
            browser.value("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
            == label
        ):
            return
    raise AssertionError(f"{label} cannot be reached by keyboard")


def test_streams_are_shown_live_and_steered_by_keyboard(tmp_path: Path, browser: Browser) -> None:
    with live(tmp_path / "state") as server:
        for number in range(3):
            server.predict("cam-1", number, adapt="wait")
        browser.open(str(server.http.base_url))
        browser.wait("document.body.innerText.includes('cam-1')")
        text = browser.value("document.body.innerText")
        assert "tent" in text
        assert "ok" in text
        assert browser.value("document.querySelectorAll('#rows svg.line polyline').length") == 1
        assert browser.value("document.querySelectorAll('#rows svg.bar rect').length") >= 1
        server.predict("cam-2", 7)
        browser.wait("document.querySelectorAll('#rows tr').length === 2")  # by itself

        tab_to(browser, "snapshot cam-1")
        browser.press("Enter")
        browser.wait(lambda: [s["kind"] for s in server.status("cam-1")["snapshots"]] == ["manual"])
        browser.wait("document.getElementById('message').innerText.includes('snapshot of cam-1 done')")
        assert browser.value("document.activeElement.getAttribute('aria-label')") == "snapshot cam-1"
        server.predict("cam-1", 3, adapt="wait")
        tab_to(browser, "rollback cam-1")
        browser.press("Enter")  # and yes to the question
        browser.wait(lambda: server.status("cam-1")["version"] == 3)
        tab_to(browser, "reset cam-1")
        browser.press("Enter")  # and yes to the question
        browser.wait(lambda: server.status("cam-1")["version"] == 0)
        tab_to(browser, "cam-1")
        browser.press("Enter")
        browser.wait("document.getElementById('events').innerText.includes('reset')")
        assert all(url.startswith((str(server.http.base_url), "data:")) for url in browser.requests), browser.requests
        assert not browser.complaints


@pytest.mark.parametrize("width", [400, 1600])
def test_everything_is_in_sight_in_light_and_dark(tmp_path: Path, browser: Browser, width: int) -> None:
    """No sideways scrolling, no button outside the window, what the guard did is told."""
    with live(tmp_path / "state", guard=True) as server:
        images = batch(1)
        images[0] *= 1e5
        server.good("POST", "/v1/streams/a-camera-with-quite-a-long-name-42/predict?adapt=wait", **raw(images))
        colours = []
        browser.resize(width, 900)
        for scheme in ("light", "dark"):
            browser.dress(scheme)
            browser.open(str(server.http.base_url))
            browser.wait("document.querySelectorAll('td.actions button').length === 3")
            text = browser.value("document.body.innerText")
            assert "guard on" in text
            assert "set aside 1" in text
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("document.querySelector('.scroll').scrollWidth") <= width
            assert browser.value(f"[...document.querySelectorAll('td.actions button')].every({INSIDE})")
            colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
            assert browser.picture().startswith(b"\x89PNG")
        assert colours == ["rgb(251, 251, 250)", "rgb(21, 23, 26)"]
        assert not browser.complaints


def test_the_page_asks_for_a_token_and_the_api_is_described(tmp_path: Path, browser: Browser) -> None:
    with live(tmp_path / "state", token=SECRET, tokens=Tokens([(SECRET, "")])) as server:
        server.predict("cam-1", 1)
        url = str(server.http.base_url)
        browser.open(url)
        browser.wait("!document.getElementById('login').hidden")
        assert "cam-1" not in browser.value("document.body.innerText")
        browser.value("document.getElementById('token').focus()")
        browser.type(SECRET)
        browser.press("Enter")
        browser.wait("document.body.innerText.includes('cam-1')")
        browser.open(f"{url}/docs")
        browser.wait("document.querySelectorAll('details').length >= 12")
        assert "/v1/streams/{stream_id}/predict" in browser.value("document.body.innerText")
        assert all(part.startswith((url, "data:")) for part in browser.requests)
