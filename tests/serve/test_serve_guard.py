"""The guard in service: what it does is answered, counted, remembered with the stream, and moved with it."""

import argparse
from pathlib import Path

import pytest
import torch
from live import Live, adaptive, assert_same_state, batch, live, network, raw

import dpl


def poisoned(number: int) -> torch.Tensor:
    images = batch(number)
    images[1] *= 1e5
    return images


def test_a_row_that_is_set_aside_gets_an_error_and_the_others_their_answer(tmp_path: Path) -> None:
    with live(tmp_path, guard=True) as server:
        for adapt in ("wait", "auto", "off"):
            answer = server.good("POST", f"/v1/streams/cam/predict?adapt={adapt}", **raw(poisoned(1)))
            rows = answer["predictions"]
            assert "out of range" in rows[1]["error"]
            assert rows[1]["class"] is None
            assert all("error" not in rows[i] and rows[i]["class"] is not None for i in (0, 2, 3))
        status = server.settled("cam")
        assert status["guard"]["counts"]["set_aside"] == 2
        assert status["distinct_classes"] <= 9
        events = server.good("GET", "/v1/streams/cam/events")["events"]
        assert [e["action"] for e in events if e["event"] == "guard"] == ["set_aside"] * 2
        text = server.http.get("/metrics").text
        assert 'dpl_guard_actions_total{action="set_aside"} 2.0' in text
        assert 'dpl_stream_frozen{stream="cam"} 0.0' in text


def test_overflow_inside_the_network_is_a_row_without_an_answer(tmp_path: Path) -> None:
    with live(tmp_path, guard=True, method="dpl") as server:
        huge = batch(1)
        huge[0] = torch.rand(3, 32, 32) * 3e38
        for adapt in ("wait", "auto"):
            rows = server.good("POST", f"/v1/streams/cam/predict?adapt={adapt}", **raw(huge))["predictions"]
            assert rows[0]["error"]
            assert rows[1]["confidence"] > 0


def test_the_guards_memory_belongs_to_the_stream(tmp_path: Path) -> None:
    """Two streams take turns on one live model; what the guard counted in one is not seen in the other."""
    with live(tmp_path, guard=True, live_models=1, max_streams_in_memory=1) as server:
        for number in range(3):
            server.good("POST", "/v1/streams/bad/predict?adapt=wait", **raw(poisoned(number)))
            server.predict("good", number, adapt="wait")
        assert server.settled("bad")["guard"]["counts"]["set_aside"] == 3
        assert "set_aside" not in server.settled("good")["guard"]["counts"]
        model = adaptive(guard=True)
        for number in range(3):
            model(batch(number))
        assert_same_state(server.state("good"), model.state_dict())
    with live(tmp_path, guard=True) as server:
        server.good("POST", "/v1/streams/bad/predict?adapt=wait", **raw(poisoned(3)))
        assert server.settled("bad")["guard"]["counts"]["set_aside"] == 4


def freeze(server: Live, stream: str) -> None:
    """Spoil the classifier of a live stream, as a method gone wrong would."""
    live = next(s for s in server.server.models if s.stream and s.stream.id == stream)
    with torch.no_grad():
        live.model.model.fc.bias.fill_(torch.inf)
    server.server.find(stream).note_change()


def test_a_collapsed_stream_is_answered_by_the_source(tmp_path: Path) -> None:
    source = adaptive("source")
    with live(tmp_path, guard=True, method="dpl") as server:
        server.predict("cam", 0, adapt="wait")
        freeze(server, "cam")
        for number in range(1, 12):
            answer = server.predict("cam", number, adapt="wait", probabilities=True).json()
        acted = server.settled("cam")["guard"]["counts"]
        assert acted["freeze"] == 1
        wanted = source.predict(batch(11)).softmax(1)
        got = torch.tensor([row["probabilities"] for row in answer["predictions"]])
        assert (got.argmax(1) == wanted.argmax(1)).float().mean() >= 0.75


@pytest.mark.parametrize(("options", "guarded"), [([], True), (["--no-guard"], False)])
def test_the_guard_is_on_unless_told_otherwise_and_shown(tmp_path: Path, options: list[str], guarded: bool) -> None:
    from dpl.cli import serve
    from dpl.cli.models import adaptation
    from dpl.data import square

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--model", "debug_cnn", "--method", "tent", *options])
    assert (dpl.adapt(network(), **adaptation(args, square(32), ())).guard is not None) == guarded
    with live(tmp_path, guard=guarded) as server:
        assert (server.good("GET", "/v1/server")["guard"] is not None) == guarded
        server.predict("cam", 1, adapt="wait")
        assert ("counts" in server.status("cam")["guard"]) == guarded
