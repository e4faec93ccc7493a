"""What every method keeps beyond the test suite: failures at many points, states read by threads, devices.

python benchmarks/conformance.py --failures 200 --threads 2000     # part of `make abuse`
python benchmarks/conformance.py --devices docs/results/data/devices.json
"""

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from origin import origin

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from conformance.operations import count_operations, first_change, run_on_meta
from conformance.subjects import labelled, names, subject
from dpl import adapt
from dpl.methods import get_method
from nets import images, network


def failures(points: int) -> list[str]:
    """Fail at `points` operations of a step of every method (all, if it has fewer); return what was changed."""
    found = []
    for name in names():
        one = subject(name)
        model = one.adapt()
        one.run(model, 2)
        total = count_operations(model, one.batches[2])
        numbers = sorted({1 + i * total // points for i in range(points)} | {total})
        change = first_change(model, one.batches[2], numbers)
        print(f"{name:20} {len(numbers):4} of {total:4} operations  {change or 'nothing changed'}", flush=True)
        found += [f"{name}: {change}"] if change else []
    return found


def torn_states(count: int) -> int:
    """Read `count` states by four threads beside a stepping one; return how many mix two steps."""
    model, batch, states = adapt(network(), "dpl", confidence=0.1), images(), []
    model(batch)

    def read() -> None:
        while len(states) < count:
            state = model.state_dict()
            states.append(len({float(value) for key, value in state.items() if key.endswith("/step")}) > 1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(states) < count:
        model(batch)
    for thread in threads:
        thread.join()
    return sum(states)


def autocast_works(name: str, kind: torch.dtype) -> bool:
    """Adapt under autocast; say whether it runs, and logits and weights stay finite."""
    one = subject(name)
    model = one.adapt()
    try:
        with torch.autocast("cpu", kind):
            logits = one.run(model, 4)
    except RuntimeError as error:
        print(f"{name}, {kind}: {error}", flush=True)
        return False
    values = [*logits, *(v for k, v in model.state_dict().items() if k.startswith("model."))]
    return all(bool(value.float().isfinite().all()) for value in values)


def device_record(name: str) -> dict[str, Any]:
    """Return one row of docs/devices.md."""
    alone, guarded, watched = (
        run_on_meta(subject(name, **beside)).step.total() for beside in ({}, {"guard": True}, {"calibrate": labelled()})
    )
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return {
        "method": name,
        "declared": get_method(name).info.host_reads,
        "reads": alone - 1,  # beside the check of the batch
        "guard": guarded - alone,  # more than without
        "estimate": watched - alone,
        "moves": True,  # run_on_meta raises otherwise
        **{label: autocast_works(name, kind) for label, kind in kinds.items()},
    }


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=0, help="operations of a step to fail at, for every method")
    parser.add_argument("--threads", type=int, default=0, help="states to read beside a stepping thread")
    parser.add_argument("--devices", type=Path, help="write what docs/devices.md shows")
    args = parser.parse_args()
    changed = failures(args.failures) if args.failures else []
    torn = torn_states(args.threads) if args.threads else 0
    if args.threads:
        print(f"{torn} torn of {args.threads} states")
    if args.devices:
        rows = []
        for name in names():
            rows.append(device_record(name))
            print(rows[-1], flush=True)
        about = origin(f"python benchmarks/conformance.py --devices {args.devices}")
        args.devices.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return bool(changed or torn)


if __name__ == "__main__":
    sys.exit(main())
