"""Many clients at once: no answer lost or mixed up, and the final state that of a serial replay of the log."""

import json
import logging
from pathlib import Path

import pytest
from live import assert_same_state, live, wait_for
from workload import Workload, check_answers, check_history

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


def test_eight_clients_of_a_hundred_requests(tmp_path: Path, journal: Journal) -> None:
    """Two workers, two live models, four of five streams in memory, a tenth of the clients leaving."""
    sizes = {"workers": 2, "live_models": 2, "max_streams_in_memory": 4, "snapshot_every": 20, "queue_per_stream": 4}
    with live(tmp_path, guard=True, **sizes) as server:
        outcomes = Workload(str(server.http.base_url), STREAMS, clients=8, requests=100).run()
        wait_for(lambda: server.server.engine._admitted == 0)
        for stream in STREAMS:
            server.settled(stream)
        counts = check_answers(outcomes)
        final = check_history(outcomes, journal.events)
        for stream in STREAMS:
            assert_same_state(server.state(stream), final[stream])
        assert sum(count for kind, count in counts.items() if kind.endswith("200")) > 300
        assert counts["auto left"] > 40
        assert server.server.metrics.failures._value.get() == 0
        assert server.server.metrics.spills._value.get() > 0
        assert len(journal.events) > 400
