"""Many clients at once: no answer lost or mixed up, and the final state that of a serial replay of the log."""

import json
import logging
import threading
import time
from pathlib import Path

import pytest
from live import adaptive, assert_same_state, batch, live, wait_for
from workload import Workload, check_answers, check_history

from dpl.serve.live import Job, LiveModel

STREAMS = [f"cam-{i}" for i in range(5)]


class Journal(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))


@pytest.fixture
def journal():
    handler = Journal()
    logging.getLogger("dpl.serve.journal").addHandler(handler)
    yield handler
    logging.getLogger("dpl.serve.journal").removeHandler(handler)


def test_eight_clients_of_fifty_requests(tmp_path: Path, journal: Journal) -> None:
    """Two workers, two live models, four of five streams in memory, a tenth of the clients leaving."""
    sizes = {"workers": 2, "live_models": 2, "max_streams_in_memory": 4, "snapshot_every": 20, "queue_per_stream": 4}
    with live(tmp_path, guard=True, **sizes) as server:
        outcomes = Workload(str(server.http.base_url), STREAMS, clients=8, requests=50).run()
        wait_for(lambda: server.server.admitted() == 0)
        for stream in STREAMS:
            server.settled(stream)
        counts = check_answers(outcomes)
        final = check_history(outcomes, journal.events)
        for stream in STREAMS:
            assert_same_state(server.state(stream), final[stream])
        assert sum(count for kind, count in counts.items() if kind.endswith("200")) > 150
        assert counts["auto left"] > 15
        assert server.server.metrics.failures._value.get() == 0
        assert server.server.metrics.spills._value.get() > 0
        assert len(journal.events) > 200


def test_a_stream_that_is_being_moved_is_not_run_meanwhile(tmp_path: Path) -> None:
    """One worker takes `a` off its live model, slowly; a request for `a` waits until that is done."""
    with live(tmp_path, workers=2, live_models=2) as server:
        for stream in ("a", "b"):
            server.predict(stream, 1, adapt="wait")
        source = server.server.source
        take, inside, go = source.difference, threading.Event(), threading.Event()

        def slowly(state):
            source.difference = take  # others are as quick as ever
            inside.set()
            assert go.wait(30)
            return take(state)

        source.difference = slowly
        moves = threading.Thread(target=server.predict, args=("c", 1))
        moves.start()
        assert inside.wait(30)
        asks = threading.Thread(target=server.predict, args=("a", 2))
        asks.start()
        wait_for(lambda: server.server.admitted(server.server.find("a")) == 1)
        time.sleep(0.2)
        assert asks.is_alive()
        go.set()
        moves.join()
        asks.join()
        model = adaptive()
        model(batch(1))
        model(batch(2))
        assert_same_state(server.state("a"), model.state_dict())


def test_the_model_of_a_stream_that_another_thread_has_is_not_taken(tmp_path: Path) -> None:
    """A stream counts as running before its model is busy when it is moved to disk, and after that when jobs end."""
    with live(tmp_path, live_models=2) as server:
        for stream in ("a", "b"):
            server.predict(stream, 1, adapt="wait")
        engine = server.server
        wait_for(lambda: not engine.find("b").running)
        engine.find("a").running = True
        server.predict("c", 1, adapt="wait")
        assert {live.stream.id for live in engine.models} == {"a", "c"}
        engine.find("a").running = False


def test_jobs_after_a_deletion_that_fails_still_have_their_stream(tmp_path: Path, monkeypatch) -> None:
    """They run in the same turn, and the deletion has taken the stream off its live model."""
    go, statuses = threading.Event(), {}

    def hold(model: LiveModel, job: Job) -> None:
        assert go.wait(30)
        job.respond(model.stream)

    def refuse(_stream: object) -> None:
        raise OSError("no room")

    with live(tmp_path) as server:
        server.predict("a", 1, adapt="wait")
        engine = server.server
        monkeypatch.setattr(server.server.writer, "delete", refuse)

        def delete() -> None:
            statuses["delete"] = server.http.delete("/v1/streams/a").status_code

        def predict() -> None:
            statuses["predict"] = server.predict("a", 2, adapt="wait").status_code

        threads = [threading.Thread(target=delete), threading.Thread(target=predict)]
        engine.admit("a", "", Job("hold", hold), create=False)
        for count, thread in enumerate(threads, start=2):
            thread.start()
            wait_for(lambda count=count: engine.admitted() == count)
        go.set()
        for thread in threads:
            thread.join()
        assert statuses == {"delete": 503, "predict": 200}
        model = adaptive()
        model(batch(1))
        model(batch(2))
        assert_same_state(server.state("a"), model.state_dict())
