"""Who may ask; and names that are no names."""

import socket
from pathlib import Path

import pytest
from live import batch, live, raw

from dpl.cli import main
from dpl.core.errors import InputError, SettingError
from dpl.serve.middleware import Tokens, require_token, same_site
from dpl.serve.store import check_stream_id

SECRET, SITE_A = "a-long-enough-secret", "the-secret-of-site-a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("state")
    (folder / "tokens").write_text(f"# all streams\n{SECRET}\n\n{SITE_A} a-\n")
    with live(folder / "state", token=SECRET, tokens=Tokens.from_file(folder / "tokens")) as running:
        yield running


def test_only_the_token_opens(server) -> None:
    for header in ("", "Bearer", f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", f"Basic {SECRET}", SECRET,
                   "Bearer é"):  # fmt: skip
        for method, path in [
            ("GET", "/v1/streams"),
            ("POST", "/v1/streams/a-1/predict"),
            ("GET", "/metrics"),
            ("GET", "/v1/server"),
            ("DELETE", "/v1/streams/a-1"),
            ("GET", "/nothing"),
        ]:
            answer = server.http.request(method, path, headers={"Authorization": header.encode("latin-1")})
            assert answer.status_code == 401, (header, path)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert server.http.get("/v1/streams").status_code == 200
    assert server.http.get("/v1/streams", headers={"Authorization": f"bearer {SECRET}"}).status_code == 200


def test_health_and_pages_need_no_token_and_tell_nothing(server) -> None:
    server.predict("secret-name", 1)
    for path in ("/", "/docs", "/healthz", "/readyz", "/openapi.json"):
        answer = server.http.get(path, headers={"Authorization": ""})
        assert answer.status_code == 200
        assert "secret-name" not in answer.text


def test_a_token_with_a_prefix_sees_its_own_streams_alone(server) -> None:
    mine = {"Authorization": f"Bearer {SITE_A}"}
    server.predict("b-1", 1)
    arguments = raw(batch(1))
    arguments["headers"] |= mine
    assert server.http.post("/v1/streams/a-1/predict", **arguments).status_code == 200
    listed = server.http.get("/v1/streams", headers=mine).json()
    assert [s["stream"] for s in listed["streams"]] == ["a-1"]
    assert listed["total"] == 1
    for method, path in [
        ("GET", ""),
        ("GET", "/events"),
        ("POST", "/snapshot"),
        ("POST", "/rollback"),
        ("POST", "/reset"),
        ("DELETE", ""),
    ]:
        other = server.http.request(method, f"/v1/streams/b-1{path}", headers=mine)
        missing = server.http.request(method, f"/v1/streams/b-0{path}", headers=mine)
        assert other.status_code == missing.status_code == 404  # one cannot even tell that it exists
    assert server.http.post("/v1/streams/b-1/predict", **arguments).status_code == 404
    assert server.http.get("/metrics", headers=mine).status_code == 404
    assert server.status("b-1")["seq"] == 1


def test_refused_requests_with_a_body_are_still_answered(server) -> None:
    """A client that sends a megabyte before it listens gets the 401, not a reset connection."""
    answer = server.http.post("/v1/streams/a/predict", content=bytes(2**20), headers={"Authorization": "no"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "../x", "..%2f..%2fetc", "a\\b", "a b", "a\n", "é", "a" * 101, "-a", "a.", "%00",
     "a\0b", "CON ", "~root", "$HOME", "a;b"],
)  # fmt: skip
def test_tricky_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="expected 1 to 100"):
        check_stream_id(name)


@pytest.mark.parametrize(
    "path", ["..", "%2e%2e", "%2e%2e%2f%2e%2e%2fx", "a%2fb", "a%00b", ".git", "a%0ab", "%252e%252e", "a b"]
)
def test_tricky_paths_reach_no_file(server, path: str) -> None:
    folder = server.server.settings.state
    before = sorted(folder.rglob("*"))
    with socket.create_connection(("127.0.0.1", server.port)) as line:  # httpx would tidy the path up
        body = batch(1).numpy().tobytes()
        head = (
            f"POST /v1/streams/{path.replace(' ', '%20')}/predict HTTP/1.1\r\n"
            f"Host: x\r\nAuthorization: Bearer {SECRET}\r\n"
            f"Content-Type: application/octet-stream\r\nX-Shape: 4,3,32,32\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        line.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    status = int(answer.split()[1])
    assert status in (404, 405, 422), answer[:200]
    assert sorted(folder.rglob("*")) == before


def test_good_names() -> None:
    for name in ("a", "camera-7", "Site.A_3", "a" * 100, "0"):
        assert check_stream_id(name) == name


def test_without_a_token_foreign_sites_are_refused(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        own = f"127.0.0.1:{server.port}"
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
            answer = server.http.post("/v1/streams/a/reset", headers=headers)
            assert answer.status_code == 403, headers
        assert server.http.get("/v1/streams", headers={"Origin": f"http://{own}"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "origin", "fine"),
    [
        ("localhost:8000", None, True),
        ("127.0.0.1", None, True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("[::1]", None, True),
        ("localhost.evil.example", None, False),
        ("", None, False),
        ("localhost:8000", "http://localhost:9000", False),
    ],
)
def test_same_site(host: str, origin: str | None, fine: bool) -> None:
    assert same_site(host, origin) is fine


def test_only_loopback_goes_without_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        require_token(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org", ""):
        with pytest.raises(SettingError, match="--token-file"):
            require_token(host, None)
        require_token(host, Tokens([(SECRET, "")]))


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    for text in ("", "# nothing\n", "short", f"{SECRET} a b"):
        path.write_text(text)
        with pytest.raises(SettingError):
            Tokens.from_file(path)


def test_the_command_refuses_a_public_address_without_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", "--model", "debug_cnn", "--host", "0.0.0.0", "--port", "0", "--state", str(tmp_path / "s")])
    assert code == 2
    assert "--token-file" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_an_empty_list_of_tokens_is_refused_as_such() -> None:
    with pytest.raises(SettingError, match="no token given"):
        Tokens([])
