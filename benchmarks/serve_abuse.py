"""Many clients against a real `dpl serve` process, then the proof that nothing was lost or mixed up.

    python benchmarks/serve_abuse.py                      # 32 clients, 2,000 requests, a tenth cancelled mid-flight

Every answer must belong to its question and show the prediction that a serial replay of the server's journal gives at
that place, to the bit; the final state of every stream must be that of the replay. Ends with code 1 if not.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serve"))

from live import Process, adaptive, assert_same_state, wait_for  # noqa: E402
from workload import Workload, check_answers, check_history  # noqa: E402

from dpl.serve.delta import SourceState  # noqa: E402
from dpl.serve.store import StreamStore  # noqa: E402

OPTIONS = "--workers 2 --live-models 2 --max-streams-in-memory 6 --snapshot-every 10 --queue-per-stream 6"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000, help="of all clients together")
    parser.add_argument("--streams", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args)


def run(folder: Path, args: argparse.Namespace) -> None:
    journal = folder / "journal.jsonl"
    server = Process(folder, *OPTIONS.split(), "--journal", str(journal))
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
    final = check_history(outcomes, [json.loads(line) for line in journal.read_text().splitlines()])
    compare_with_disk(folder / "state", final)
    report(outcomes, counts, seconds, grown)


def resident(server: Process) -> float:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096 / 2**20


def wait_until_idle(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        wait_for(lambda: "dpl_queue 0.0" in http.get("/metrics").text)


def compare_with_disk(folder: Path, final: dict) -> None:
    source = SourceState(adaptive(guard=True).state_dict())
    store = StreamStore(folder, json.loads((folder / "model.json").read_text()), keep=5)
    for stream, state in final.items():
        saved, problems = store.newest(stream)
        assert not problems, problems
        assert_same_state(source.restored(saved.delta) if saved else adaptive(guard=True).state_dict(), state)
    store.close()


def report(outcomes: list, counts: dict, seconds: float, grown: float) -> None:
    times = sorted(o.seconds for o in outcomes if o.seconds)
    marks = {name: 1000 * times[int(share * (len(times) - 1))] for name, share in
             (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}  # fmt: skip
    for kind, count in sorted(counts.items()):
        print(f"{kind:16} {count}")
    print(f"{len(outcomes)} requests in {seconds:.1f} s; " + ", ".join(f"{k} {v:.0f} ms" for k, v in marks.items()))
    print(f"memory of the server grew by {grown:.0f} MB")
    print("every answer and every final state is that of a serial replay, to the bit")


if __name__ == "__main__":
    main()
