"""Abuse an adapting model in every way we know, in full, and say what was held.

    make abuse                                         # everything; hours on one core
    python benchmarks/abuse.py --parts kills damage    # some of it
    python benchmarks/abuse.py --scale 0.25            # shorter streams
    python benchmarks/abuse.py --jobs 8                # as many processes at a time

Finished tasks are kept in OUT/records.jsonl and not repeated, so that a run can be stopped and started again. Writes
OUT/abuse.json and OUT/abuse.md; ends with code 1 if a mark was missed. The subject is the small residual network of
tests/parity on real handwritten digits; the cost in time is also measured on CIFAR-10's ResNet-20 where its checkpoint
(`--resnet`) and images (`--images`) are at hand.
The server is abused by benchmarks/serve_abuse.py.
"""

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import dpl
from abuse import corruption, endurance, killing
from abuse.report import as_markdown
from abuse.scenarios import SCENARIOS, alarms, play
from abuse.streams import iid, network
from abuse.subjects import adapted, methods
from dpl.backbones import create
from dpl.core.errors import DplError, SnapshotCorrupt
from dpl.methods import list_methods
from dpl.snapshot import SnapshotStore

Facts = dict[str, Any]
TIMED = ("cost", "soak")


class Task(NamedTuple):
    """One thing to try; `run` returns its facts, with `passed` among them, or raises AssertionError."""

    part: str
    name: str
    run: Callable[[], Facts]


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    """Everything there is to try, the short things first, the guarded streams before the others."""
    yield Task("kills", "random", lambda: kills(args.kills, args.seed))
    yield Task("kills", "every moment of a save", kills_at_every_moment)
    yield Task("damage", "snapshots", lambda: damage(args.seed))
    for offer in corruption.MALICIOUS:
        yield Task("malicious", offer.__name__, lambda offer=offer: malicious(offer))
    for method, shift in (("tent", "noise"), ("dpl", "noise"), ("tent", "easy"), ("norm", "shifted")):
        yield Task("alarms", f"{method}, {shift}", lambda m=method, s=shift: alarms(m, s, args.batches))
    for method in ("tent", "dpl"):
        yield Task("cost", f"small network, {method}", lambda m=method: cost(m))
        if args.resnet is not None and args.images is not None:
            yield Task("cost", f"ResNet-20, {method}", lambda m=method: cost(m, args.resnet, args.images))
    for method in args.methods:
        yield Task("bad rows", method, lambda m=method: endurance.bad_rows_leave_no_trace(m) or {})
        yield Task("reset", method, lambda m=method: endurance.resetting_is_exact(m, images(100, args.scale)) or {})
        yield Task("resume", method, lambda m=method: resume(m, args.scale, args.seed))
    with_digits = [method for method in args.methods if method in methods()]
    for guard in (True, False):
        for scenario in args.scenarios:
            for method in with_digits:
                name = f"{method}, {scenario}, {'on' if guard else 'off'}"
                yield Task("streams", name, lambda m=method, s=scenario, g=guard: asdict(play(m, s, g, args.scale)))
    yield Task("soak", "tent", lambda: soak(args.scale))


def images(batches: int, scale: float, size: int = 16) -> list[torch.Tensor]:
    return [batch for batch, _ in iid("noise", size * max(12, round(batches * scale)), size=size)]


def kills(count: int, seed: int) -> Facts:
    """Kill writers of snapshots at random moments; every check of what is left is in `killing.check`."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        acknowledged = [killing.kill_at_random(Path(folder), rng) for _ in range(count)]
    assert max(acknowledged) > 0, "no writer lived long enough to finish a snapshot"
    return {"kills": count, "acknowledged": max(acknowledged), "lost": 0}


def kills_at_every_moment() -> Facts:
    moments = 0
    with tempfile.TemporaryDirectory() as folder:
        while killing.kill_at_moment(Path(folder) / str(moments), moments + 1) is not None:
            moments += 1
    return {"kills": moments, "lost": 0}


def damage(seed: int) -> Facts:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        store, model = SnapshotStore(folder), adapted("tent")
        good, victim = store.save(model), store.save(model)
        tried = corruption.damages(victim, good, cuts=50, flips=200, rng=random.Random(seed))
        for file, change in tried:
            with corruption.applied(file, change):
                refused = _refusal(lambda: dpl.load(victim, network()), SnapshotCorrupt)
                assert file.name in refused, f"damage of {file.name} was not refused by name: {refused!r}"
                assert store.newest() == good, "the snapshot before was not taken"
        return {"tried": len(tried), "refused": len(tried)}


def malicious(offer: corruption.Offer) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        proof = Path(folder) / "executed"
        refused = _refusal(lambda: offer(Path(folder), proof), (DplError, OSError))
        assert refused, "was accepted"
        assert not proof.exists(), "ran code"
        return {"refused": refused.replace(folder, "...")[:160]}


def _refusal(call: Callable[[], Any], kind: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def resume(method: str, scale: float, seed: int) -> Facts:
    batches = images(300, scale)
    cuts = sorted(random.Random(seed).sample(range(1, len(batches)), 10 if scale >= 1 else 3))
    with tempfile.TemporaryDirectory() as folder:
        endurance.resuming_is_exact(method, Path(folder), batches, cuts)
    return {"batches": len(batches), "cuts": len(cuts)}


def cost(method: str, weights: Path | None = None, pictures: Path | None = None, rounds: int = 300) -> Facts:
    """Feed a guarded and an unguarded model the same batches in turn; processor time of one over the other."""
    source, batches = network(), [batch for batch, _ in iid("noise", 32 * rounds)]
    if weights is not None and pictures is not None:
        source, rounds = create("cifar_resnet20", weights=weights), 24
        with np.load(pictures, allow_pickle=False) as file:
            found = torch.from_numpy(file["images"][: 64 * 16]).permute(0, 3, 1, 2).float() / 255
        batches = [batch.contiguous() for batch in found.split(64)]
    pair = [dpl.adapt(source, method, guard=guard, layout="as_is") for guard in (False, True)]
    spent: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 8):
        for which in (0, 1) if i % 2 else (1, 0):
            start = time.process_time()
            pair[which](batches[i % len(batches)])
            spent[which].append(time.process_time() - start)
    off, on = (sum(times[8:]) for times in spent)  # the first looks are at whole batches
    frozen = pair[1].guard is not None and pair[1].guard.frozen
    facts = {"rounds": rounds, "ms_off": 1000 * statistics.median(spent[0][8:]), "ratio": on / off}
    return facts | {"passed": on <= 1.1 * off and not frozen}


def soak(scale: float) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        grown = endurance.soak(Path(folder), batches=round(10_000 * scale), warm=round(1000 * scale))
    steady = grown["files"] == grown["threads"] == 0 and grown["snapshots"] == 2
    return grown | {"passed": steady and grown["megabytes"] < 20}


def attempt(task: Task) -> Facts:
    start = time.monotonic()
    try:
        facts = {"passed": True} | task.run()
    except Exception as error:  # a broken promise or a crash: both belong into the table
        facts = {"passed": False, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"part": task.part, "name": task.name, "seconds": round(time.monotonic() - start, 1)} | facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/abuse"))
    parser.add_argument("--parts", nargs="*", help="kills damage malicious alarms cost streams ... (default: all)")
    parser.add_argument("--methods", nargs="*", default=list_methods())
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--guard", choices=("on", "off", "both"), default="both", help="of the streams")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the streams")
    parser.add_argument("--batches", type=int, default=1000, help="of each ordinary stream in the count of alarms")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resnet", type=Path, help="cifar10_resnet20.safetensors, for the cost in time, with")
    parser.add_argument("--images", type=Path, help="an .npz with `images` of CIFAR-10 [N, 32, 32, 3]")
    return parser.parse_args()


def wanted(args: argparse.Namespace, task: Task) -> bool:
    other = {"on": ", off", "off": ", on", "both": "\n"}[args.guard]
    return (args.parts is None or task.part in args.parts) and not task.name.endswith(other)


def carry_out(args: argparse.Namespace, numbers: list[int]) -> Iterator[Facts]:
    """Run the tasks of these numbers in `--jobs` processes; what measures time has the machine to itself."""
    parts = [task.part for task in tasks(args)]
    timed = [number for number in numbers if args.jobs == 1 or parts[number] in TIMED]
    for number in timed:
        yield carry_out_one(args, number)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        rest = [pool.submit(carry_out_one, args, number) for number in numbers if number not in timed]
        for finished in as_completed(rest):
            yield finished.result()


def carry_out_one(args: argparse.Namespace, number: int) -> Facts:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    task = next(islice(tasks(args), number, None))
    return attempt(task) | {"scale": args.scale}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "records.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(record["part"], record["name"]) for record in records}
    todo = [n for n, task in enumerate(tasks(args)) if wanted(args, task) and task[:2] not in done]
    for record in carry_out(args, todo):
        records.append(record)
        with log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print("passed" if record["passed"] else "MISSED", record["part"], record["name"], flush=True)
    facts = {"scale": args.scale, "seed": args.seed, "torch": torch.__version__, "records": records}
    (args.out / "abuse.json").write_text(json.dumps(facts, indent=1))
    (args.out / "abuse.md").write_text(as_markdown(records))
    missed = [r for r in records if not r["passed"] and not r["name"].endswith(", off")]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
