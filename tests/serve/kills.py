"""kill -9 of a serving process at random moments under load, again and again, and the proof that nothing was lost."""

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from live import Process, adaptive, batch, raw, wait_for
from torch import Tensor

from dpl.serve.live import SourceState
from dpl.serve.store import StreamStore

IMAGES = 2
MANUAL = 9  # a snapshot by hand after every so many batches
# The guard never freezes: a client names its batches by how many were adapted to, and frozen ones do not count.
NEVER = 1e9


@dataclass
class Ledger:
    """What the server has acknowledged about one stream, and what its clients have seen."""

    stream: str
    seq: int = 0  # the last act that was answered
    durable: int = 0  # nothing up to here may be lost
    answers: int = 0
    back: float = 0.0  # when the first answer after a restart came

    def note(self, answer: Mapping[str, int]) -> None:
        self.seq = answer["seq"]
        self.durable = max(self.durable, answer["durable_through"])
        self.answers += 1
        self.back = self.back or time.monotonic()


class Client(threading.Thread):
    """Sends one stream its batches, each named by how many it has adapted to, until the server is gone."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        super().__init__()
        self.url, self.ledger = url, ledger
        ledger.back = 0.0
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=300) as http:
            try:
                path = f"/v1/streams/{self.ledger.stream}"
                known = http.get(path)
                number = known.json()["adapted_batches"] if known.status_code == 200 else 0
                while True:
                    self._good(http.post(f"{path}/predict?adapt=wait", **raw(batch(number, IMAGES))))
                    number += 1
                    if number % MANUAL == 0:
                        self._good(http.post(f"{path}/snapshot"))
            except httpx.TransportError:
                return

    def _good(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        self.ledger.note(answer.json())


@dataclass
class Reference:
    """The state after so many batches, as a digest: every stream gets the same ones."""

    digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = adaptive(guard={"limit": NEVER})
        self.digests.append(digest(self.model.state_dict()))

    def after(self, steps: int) -> str:
        while len(self.digests) <= steps:
            self.model(batch(len(self.digests) - 1, IMAGES))
            self.digests.append(digest(self.model.state_dict()))
        return self.digests[steps]


def digest(state: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for key in sorted(state):
        total.update(key.encode() + state[key].detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Kills:
    """A server that is killed and started again; `lost` must stay empty."""

    folder: Path
    streams: int = 4
    every: int = 5
    seed: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from each start to an answer for every stream
    work: list[float] = field(default_factory=list)  # the processor time of that, whatever else the machine does

    def __post_init__(self) -> None:
        self.ledgers = [Ledger(f"cam-{i}") for i in range(self.streams)]
        self.reference, self.source = Reference(), SourceState(adaptive(guard={"limit": NEVER}).state_dict())
        self.draw = random.Random(self.seed)
        self.checked = 0

    def run(self, times: int) -> None:
        for _ in range(times):
            begun = time.monotonic()
            options = ["--snapshot-every", str(self.every), "--latency-budget", "60", "--guard-set", f"limit={NEVER}"]
            server = Process(self.folder, *options)
            clients = [Client(server.url, ledger) for ledger in self.ledgers]
            wait_for(lambda: all(ledger.back for ledger in self.ledgers), 300)  # the machine may have much else to do
            self.seconds.append(max(ledger.back for ledger in self.ledgers) - begun)
            self.work.append(processor_seconds(server.process.pid))
            time.sleep(self.draw.uniform(0, 1.0))
            server.kill()
            for client in clients:
                client.join()
            self._check()

    def _check(self) -> None:
        """Read the disk while no server runs: nothing acknowledged is missing, and every state is exact."""
        identity = json.loads((self.folder / "state" / "model.json").read_text())
        store = StreamStore(self.folder / "state", identity, keep=5)
        for ledger in self.ledgers:
            saved, problems = store.newest(ledger.stream)
            seq, adapted = (saved.seq, saved.adapted) if saved else (0, 0)
            state = self.source.restored(saved.difference) if saved else adaptive(guard={"limit": NEVER}).state_dict()
            self.checked += 1
            if problems or not ledger.durable <= seq <= ledger.seq + 1:
                self.lost.append(f"{ledger.stream}: acknowledged {ledger.durable}, found {seq} {problems}")
            if digest(state) != self.reference.after(adapted):
                self.lost.append(f"{ledger.stream}: another state than after {adapted} batches")
            ledger.seq = ledger.durable = seq
        store.close()
