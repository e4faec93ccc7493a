"""Many clients at once, some of which leave, read slowly or ask for odd things; and the proof of what came of it."""

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from live import Replay, adaptive, batch
from torch import Tensor

IMAGES = 2
ACTS = {"auto": 60, "wait": 20, "off": 5, "snapshot": 5, "rollback": 4, "reset": 2, "status": 4}


@dataclass
class Outcome:
    """What a client asked and what it got; no answer: it left before."""

    request_id: str
    stream: str
    act: str
    number: int
    status: int | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Workload:
    """Clients that send `requests` each, to random streams."""

    url: str
    streams: Sequence[str]
    clients: int
    requests: int
    leaving: float = 0.1
    slow: float = 0.03
    seed: int = 0

    def run(self) -> list[Outcome]:
        outcomes: list[list[Outcome]] = [[] for _ in range(self.clients)]
        threads = [threading.Thread(target=self._client, args=(i, outcomes[i])) for i in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outcome for part in outcomes for outcome in part]

    def _client(self, client: int, outcomes: list[Outcome]) -> None:
        draw = random.Random(f"{self.seed}-{client}")
        with httpx.Client(base_url=self.url, timeout=60) as http:
            for i in range(self.requests):
                act = draw.choices(list(ACTS), list(ACTS.values()))[0]
                stream = draw.choice(self.streams)
                outcome = Outcome(f"c{client}-r{i}", stream, act, 1000 * client + i)
                outcomes.append(outcome)
                if draw.random() < self.leaving:
                    self._leave(outcome, draw)
                elif draw.random() < self.slow:
                    self._read_slowly(outcome)
                else:
                    _ask(http, outcome)

    def _leave(self, outcome: Outcome, draw: random.Random) -> None:
        """Send all or a part of a request, and go."""
        outcome.act = "auto"
        with self._connect() as line:
            message = _message(outcome)
            line.sendall(message if draw.random() < 0.7 else message[: draw.randrange(len(message))])
            time.sleep(draw.random() * 0.02)

    def _read_slowly(self, outcome: Outcome) -> None:
        outcome.act = "auto"
        with self._connect() as line:
            line.sendall(_message(outcome))
            text = b""
            while part := line.recv(16 if len(text) < 256 else 4096):
                text += part
                time.sleep(0.002)
        head, _, body = text.partition(b"\r\n\r\n")
        outcome.status, outcome.answer = int(head.split()[1]), json.loads(body)

    def _connect(self) -> socket.socket:
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=60)


def _ask(http: httpx.Client, outcome: Outcome) -> None:
    path, headers, start = f"/v1/streams/{outcome.stream}", {"X-Request-ID": outcome.request_id}, time.monotonic()
    if outcome.act in ("auto", "wait", "off"):
        answer = http.post(
            f"{path}/predict?adapt={outcome.act}&probabilities=true",
            content=_body(outcome.number),
            headers=headers | {"Content-Type": "application/octet-stream", "X-Shape": f"{IMAGES},3,32,32"},
        )
    elif outcome.act == "status":
        answer = http.get(path, headers=headers)
    else:
        answer = http.post(f"{path}/{outcome.act}", headers=headers)
    outcome.status, outcome.answer = answer.status_code, answer.json()
    outcome.seconds = time.monotonic() - start
    assert answer.headers["x-request-id"] == outcome.request_id
    if answer.status_code in (429, 503):
        time.sleep(min(0.05, float(answer.headers["retry-after"])))


def _body(number: int) -> bytes:
    return batch(number, IMAGES).numpy().astype("<f4").tobytes()


def _message(outcome: Outcome) -> bytes:
    body = _body(outcome.number)
    head = (
        f"POST /v1/streams/{outcome.stream}/predict?probabilities=true HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"X-Request-ID: {outcome.request_id}\r\nX-Shape: {IMAGES},3,32,32\r\nConnection: close\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def check_answers(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Every answer belongs to its question; return how many there were of each kind."""
    for outcome in outcomes:
        assert outcome.status in (None, 200, 404, 409, 429, 503), outcome
    for outcome in (outcome for outcome in outcomes if outcome.status == 200 and outcome.act != "status"):
        assert outcome.answer["request_id"] == outcome.request_id
        assert outcome.answer["stream"] == outcome.stream
    return Counter(f"{outcome.act} {outcome.status or 'left'}" for outcome in outcomes)


def check_history(
    outcomes: Sequence[Outcome], journal: Sequence[Mapping[str, Any]], guard: bool = True
) -> dict[str, dict[str, Tensor]]:
    """Replay each stream in the logged order: same predictions for every answer. Returns the final states."""
    final = {}
    for stream in {outcome.stream for outcome in outcomes}:
        events = [event for event in journal if event["stream"] == stream]
        acts = [e["request_id"] for e in events if e["event"] in ("predict", "rollback", "reset")]
        assert len(acts) == len(set(acts)), "something was done twice"
        mine = {o.request_id: o for o in outcomes if o.stream == stream}
        replay = Replay(adaptive(guard=guard), {key: batch(o.number, IMAGES) for key, o in mine.items()})
        final[stream] = replay.run(events)
        predicted = [o for o in mine.values() if o.status == 200 and o.act in ("auto", "wait", "off")]
        for outcome in predicted:
            got = torch.tensor([row["probabilities"] for row in outcome.answer["predictions"]])
            done = outcome.answer["adaptation"]["status"] == "done"
            wanted = (replay.after if done else replay.first)[outcome.request_id]
            assert torch.equal(got, wanted), outcome.request_id
    return final
