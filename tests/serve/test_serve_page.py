"""The page: one file, nothing from elsewhere, live, and usable by keyboard alone."""

import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from live import live

from dpl.serve.security import Tokens

SECRET = "a-long-enough-secret"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


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
def browser(tmp_path: Path):
    running = Browser(tmp_path / "profile")
    yield running
    running.close()


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


@needs_chromium
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
        assert browser.value("document.activeElement.getAttribute('aria-label')") == "snapshot cam-1"
        tab_to(browser, "reset cam-1")
        browser.press("Enter")  # and yes to the question
        browser.wait(lambda: server.status("cam-1")["version"] == 0)
        tab_to(browser, "cam-1")
        browser.press("Enter")
        browser.wait("document.getElementById('events').innerText.includes('reset')")
        assert all(url.startswith((str(server.http.base_url), "data:")) for url in browser.requests), browser.requests
        assert not browser.complaints


@needs_chromium
def test_light_and_dark(tmp_path: Path, browser: Browser) -> None:
    with live(tmp_path / "state") as server:
        colours = []
        for scheme in ("light", "dark"):
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.open(str(server.http.base_url))
            browser.wait("document.readyState === 'complete' && document.body.innerText.includes('No stream yet')")
            colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
        assert colours == ["rgb(251, 251, 250)", "rgb(21, 23, 26)"]


@needs_chromium
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
