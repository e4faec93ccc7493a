"""A real `dpl serve` process, abused: many clients at once, kill -9 under load, hostile requests.

    python benchmarks/serve_abuse.py                    # all three
    python benchmarks/serve_abuse.py clients --clients 32 --requests 2000
    python benchmarks/serve_abuse.py kills --kills 50
    python benchmarks/serve_abuse.py hostile

clients: a tenth leaves mid-flight, some read slowly. Every answer must belong to its question and show the prediction
that a serial replay of the server's journal gives at that place, to the bit; the final state of every stream must be
that of the replay. kills: nothing acknowledged as durable is missing on the disk, every state is exact, and all streams
answer again within ten seconds (of processor time, if the machine is busy). hostile: pickles, YAML tags, image bombs,
path tricks, oversized and malformed bodies earn a refusal and nothing else. The exit code is 1 if any of it is not so.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serve"))

from hostile import MEGABYTE, attacks, refused
from kills import Kills
from live import Process, adaptive, assert_same_state, batch, raw, wait_for
from workload import Outcome, Workload, check_answers, check_history

from dpl.serve.live import SourceState
from dpl.serve.store import StreamStore

OPTIONS = "--workers 2 --live-models 2 --max-streams-in-memory 6 --snapshot-every 10 --queue-per-stream 6"
BACK_WITHIN = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["all", "clients", "kills", "hostile"], default="all")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000, help="of all clients together")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--no-guard", action="store_true", help="clients: without the guard, every batch is adapted to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dpl").setLevel(logging.CRITICAL)  # the guard's remarks on the replay are those of the server
    parts = {"clients": many_clients, "kills": many_kills, "hostile": hostile_requests}
    for name, run in parts.items():
        if args.part in ("all", name):
            with tempfile.TemporaryDirectory() as folder:
                run(Path(folder), args)


def many_clients(folder: Path, args: argparse.Namespace) -> None:
    journal, guard = folder / "journal.jsonl", not args.no_guard
    server = Process(folder, *OPTIONS.split(), "--journal", str(journal), *([] if guard else ["--no-guard"]))
    streams = [f"cam-{i}" for i in range(args.streams)]
    try:
        memory = resident(server)
        start = time.monotonic()
        requests = -(-args.requests // args.clients)
        outcomes = Workload(server.url, streams, args.clients, requests).run()
        seconds = time.monotonic() - start
        wait_until_idle(server.url)
        grown = resident(server) - memory
    finally:
        server.stop()
    counts = check_answers(outcomes)
    final = check_history(outcomes, [json.loads(line) for line in journal.read_text().splitlines()], guard)
    compare_with_disk(folder / "state", final, guard)
    report(outcomes, counts, seconds, grown)


def resident(server: Process) -> float:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096 / MEGABYTE


def wait_until_idle(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        wait_for(lambda: "dpl_queue 0.0" in http.get("/metrics").text)


def compare_with_disk(folder: Path, final: Mapping[str, Mapping[str, Tensor]], guard: bool) -> None:
    source = SourceState(adaptive(guard=guard).state_dict())
    store = StreamStore(folder, json.loads((folder / "model.json").read_text()), keep=5)
    for stream, state in final.items():
        saved, problems = store.newest(stream)
        assert not problems, problems
        assert_same_state(source.restored(saved.difference) if saved else adaptive(guard=guard).state_dict(), state)
    store.close()


def report(outcomes: Sequence[Outcome], counts: Counter[str], seconds: float, grown: float) -> None:
    times = sorted(o.seconds for o in outcomes if o.seconds)
    marks = {name: 1000 * times[int(share * (len(times) - 1))] for name, share in
             (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}  # fmt: skip
    print("clients: " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    print(f"clients: {len(outcomes)} requests in {seconds:.1f} s ({len(outcomes) / seconds:.0f} a second); "
          + ", ".join(f"{k} {v:.0f} ms" for k, v in marks.items()))  # fmt: skip
    print(f"clients: memory of the server grew by {grown:.0f} MB")
    print("clients: every answer and every final state is that of a serial replay, to the bit")


def many_kills(folder: Path, args: argparse.Namespace) -> None:
    kills = Kills(folder)
    for done in range(1, args.kills + 1):
        kills.run(1)
        if done % 10 == 0 or done == args.kills:  # what was reached is known if the run is ended early
            answers = sum(ledger.answers for ledger in kills.ledgers)
            print(f"kills: {done} x kill -9 under load of {kills.streams} clients, {answers} answers; "
                  f"{kills.checked} states read, {len(kills.lost)} lost or changed", flush=True)  # fmt: skip
    print(f"kills: started again, all streams answer after {statistics.median(kills.seconds):.1f} s in the median, "
          f"{max(kills.seconds):.1f} s at most; {max(kills.work):.1f} s of processor time at most; "
          f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")  # fmt: skip
    assert not kills.lost, kills.lost
    idle = os.getloadavg()[1] <= (os.cpu_count() or 1)  # on a busy machine the clock tells of the others
    assert max(kills.seconds if idle else kills.work) < BACK_WITHIN, kills.seconds


def hostile_requests(folder: Path, _args: argparse.Namespace) -> None:
    trace = folder / "trace"
    server = Process(folder, "--max-body", str(4 * MEGABYTE), "--timeout", "300")  # a busy machine refuses nothing
    try:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            http.post("/v1/streams/known/predict", **raw(batch(1))).raise_for_status()
            memory, peak, count = resident(server), 0.0, 0
            for attack in attacks(trace):
                refused(server.url, attack)
                count, peak = count + 1, max(peak, resident(server))
                assert http.post("/v1/streams/known/predict", **raw(batch(count))).status_code == 200, attack.name
            failures = [line for line in http.get("/metrics").text.splitlines() if 'status="5' in line]
    finally:
        server.stop()
    assert not trace.exists()
    assert not failures, failures
    assert [path.name for path in (folder / "state" / "streams").iterdir()] == ["known"]
    print(f"hostile: {count} of {count} refused, each followed by a good answer; no 500, no trace, no file; "
          f"memory at most {peak - memory:.0f} MB above the start")  # fmt: skip


if __name__ == "__main__":
    main()
