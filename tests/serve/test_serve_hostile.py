"""Malicious pickles, YAML tags, image bombs, path tricks, oversized and malformed bodies: refusals, nothing else."""

from pathlib import Path

import pytest
from hostile import MEGABYTE, attacks, pickles, refused
from live import live, network
from safetensors.torch import save_file


def test_every_attack_is_refused(tmp_path: Path) -> None:
    trace, state = tmp_path / "trace", tmp_path / "outer" / "state"
    with live(state, max_body=4 * MEGABYTE) as server:
        server.predict("known", 1)
        url = str(server.http.base_url)
        for attack in attacks(trace):
            refused(url, attack)
        assert server.predict("known", 2).status_code == 200
        assert server.server.metrics.failures._value.get() == 0
        assert [s["stream"] for s in server.good("GET", "/v1/streams")["streams"]] == ["known"]
        assert 'status="500"' not in server.http.get("/metrics").text
    assert not trace.exists()
    assert sorted(path.name for path in (state / "streams").iterdir()) == ["known"]
    assert [path.name for path in state.parent.iterdir()] == ["state"]


def test_a_snapshot_that_is_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    """Every file of the newest snapshot replaced by a malicious one; the stream goes on from the one before."""
    trace, state = tmp_path / "trace", tmp_path / "state"
    with live(state) as server:
        for number in range(2):
            server.predict("cam", number, adapt="wait")
            server.good("POST", "/v1/streams/cam/snapshot")
    newest = max((state / "streams" / "cam").iterdir())
    for file in newest.iterdir():
        file.write_bytes(pickles(trace)["torch file"])
    with live(state) as server:
        answer = server.predict("cam", 3, adapt="wait").json()
        assert answer["seq"] > 2
        events = server.good("GET", "/v1/streams/cam/events")["events"]
        assert any(newest.name in str(event) for event in events), events
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["pickle", "torch file", "npy", "zip"])
def test_weights_that_are_a_pickle_are_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    from dpl.cli import main

    trace = tmp_path / "trace"
    for suffix in (".safetensors", ".pth"):
        weights = tmp_path / f"weights{suffix}"
        weights.write_bytes(pickles(trace)[kind])
        options = ["--model", str(weights), "--network", "debug_cnn", "--port", "0", "--state", str(tmp_path / "s")]
        assert main(["serve", *options]) == 2
        assert weights.name in capsys.readouterr().err
    assert not trace.exists()


def test_tokens_and_class_names_that_are_a_pickle_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dpl.cli import main

    trace, weights, evil = tmp_path / "trace", tmp_path / "good.safetensors", tmp_path / "evil"
    save_file({key: value.contiguous() for key, value in network().state_dict().items()}, weights)
    evil.write_bytes(pickles(trace)["pickle"])
    common = ["serve", "--model", str(weights), "--network", "debug_cnn", "--port", "0", "--state", str(tmp_path / "s")]
    for option in ("--token-file", "--classes"):
        assert main([*common, option, str(evil)]) == 2
        assert "evil" in capsys.readouterr().err
    assert not trace.exists()
