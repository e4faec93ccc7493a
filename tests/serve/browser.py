"""Chromium without a window, driven through its debugging pipe: no driver, no further package."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Tab": 9, "Enter": 13}


@cache
def chromium() -> str | None:
    """The browser; where it is missing and this is a root's Debian (a container, as a rule) it is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("apt-get update", "apt-get install -y --no-install-recommends chromium"):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command.split(), env=environment, capture_output=True, timeout=200, check=False)
        found = shutil.which("chromium")
    return found


@contextmanager
def open_browser() -> Iterator["Browser"]:
    """A browser for a test, which is skipped where there is none."""
    program = chromium()
    if program is None:
        pytest.skip("Chromium is not installed and cannot be: that needs root and apt-get")
    running = Browser(program)
    try:
        yield running
    finally:
        running.close()


class Browser:
    """One tab of one browser."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dpl-", ignore_cleanup_errors=True)  # a short path: sockets
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = (
            "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-dev-shm-usage "
            f"--disable-background-networking --user-data-dir={self._folder.name}/p"
        )
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands, answers)]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in zip(high, (3, 4), strict=True)]
        environment = {**os.environ, "TMPDIR": self._folder.name}  # or it would litter the common one
        self._process = os.posix_spawn(program, [program, *options.split()], environment, file_actions=[*quiet, *pipes])
        for fd in (commands, answers, *high):
            os.close(fd)
        self._rest, self._count, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            part = os.read(self._from, 65536)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(facts["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "assert"):
            self.complaints.append(str(facts["args"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.complaints.append(facts["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self._count += 1
            accept = {"id": self._count, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._to, json.dumps(accept | {"sessionId": self._session}).encode() + b"\0")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, condition: str | Callable[[], Any], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not (self.value(condition) if isinstance(condition, str) else condition()):
            assert time.monotonic() < end, f"{condition}: {self.value('document.body.innerText')} {self.complaints}"
            self._next(0.05)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dress(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def press(self, key: str) -> None:
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "text": "\r" if key == "Enter" else ""}
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def close(self) -> None:
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()
