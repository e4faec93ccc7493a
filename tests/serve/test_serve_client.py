"""The client of a few lines, against a real server."""

import io
from pathlib import Path

import numpy as np
import pytest
from live import batch, live
from PIL import Image

from dpl.core.errors import InputError
from dpl.serve.client import Client, ServeError
from dpl.serve.middleware import Tokens

SECRET = "a-long-enough-secret"


def test_a_round_through_everything(tmp_path: Path) -> None:
    with live(tmp_path / "state", tokens=Tokens([(SECRET, "")])) as server:
        client = Client(f"http://127.0.0.1:{server.port}/", token=SECRET)
        camera = client.stream("camera-7")
        picture = io.BytesIO()
        Image.new("RGB", (50, 40), (200, 30, 30)).save(picture, "JPEG")
        (tmp_path / "a.jpg").write_bytes(picture.getvalue())
        answer = camera.predict([tmp_path / "a.jpg", picture.getvalue()], top=2)
        assert answer["predictions"][0] == answer["predictions"][1]
        assert len(answer["predictions"][0]["top"]) == 2
        done = camera.predict(batch(1).numpy(), adapt="wait", probabilities=True)
        assert done["adaptation"]["updated"] is True
        assert len(done["predictions"][0]["probabilities"]) == 10
        kept = camera.snapshot()["snapshot"]["seq"]
        camera.predict(np.asarray(batch(2)), adapt="wait")
        assert camera.rollback()["restored"]["seq"] == kept == camera.rollback(kept)["restored"]["seq"]
        camera.reset()
        assert camera.status()["version"] == 0
        assert [e["event"] for e in camera.events(after=kept)][-2:] == ["reset", "snapshot"]
        assert [s["stream"] for s in client.streams()] == ["camera-7"]
        assert client.request("GET", "/v1/server")["method"] == "tent"
        assert client.request("GET", "/healthz")["status"] == "ok"
        assert camera.delete()["deleted"] is True


def test_errors_say_what_the_server_said(tmp_path: Path) -> None:
    with live(tmp_path, tokens=Tokens([(SECRET, "")])) as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ServeError, match="401: expected a header Authorization"):
            Client(url).streams()
        client = Client(url, token=SECRET)
        with pytest.raises(ServeError, match="404: no stream 'x'"):
            client.stream("x").status()
        with pytest.raises(ServeError, match="404"):
            client.stream("../x").predict(batch(1).numpy())
        with pytest.raises(ServeError, match="422: stream"):
            client.stream(".x").predict(batch(1).numpy())
        with pytest.raises(ServeError, match="422: image 0"):
            client.stream("x").predict([b"no image"])
    with pytest.raises(ServeError, match="refused"):
        Client(url).streams()
    with pytest.raises(InputError, match="http"):
        Client("file:///etc/passwd")
    with pytest.raises(InputError, match="list"):
        client.stream("x").predict("a.jpg")


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    with live(tmp_path, max_streams=1) as server:
        url = f"http://127.0.0.1:{server.port}"
        engine = server.server
        engine.accepting = False
        client = Client(url, retries=0)
        with pytest.raises(ServeError, match="503: the server is stopping"):
            client.stream("a").predict(batch(1).numpy())
        naps: list[float] = []

        def open_again(seconds: float) -> None:
            naps.append(seconds)
            engine.accepting = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dpl.serve.client.time.sleep", open_again)
            assert Client(url).stream("a").predict(batch(1).numpy())["seq"] == 1
        assert naps == [5.0]
