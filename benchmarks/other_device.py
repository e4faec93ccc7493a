"""Every method on a CPU and on a second device: the same answers and states, and snapshots that travel both ways.

python benchmarks/other_device.py --device xla --out docs/results/data/other_device.json

`xla` needs an environment of its own with torch_xla and the torch of the same version; PJRT_DEVICE=CPU gives a device
that is this machine's CPU, reached through another compiler and other kernels. `cpu` compares the CPU with itself.
Each method runs in a process of its own: one that torch_xla refuses must not spoil the next. Stopped and started
again, it goes on where it was.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from origin import origin
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from conformance.subjects import labelled, names, subject
from dpl.testing import Subject

GUARDED = ("tent", "dpl", "dpl_soft", "cotta", "lame", "t3a")
STEPS = 3


def device_called(name: str) -> torch.device:
    """Return the device; for XLA, work around two faults of torch_xla 2.9 first."""
    if name != "xla":
        return torch.device(name)
    import torch_xla

    F.batch_norm = _batch_norm
    torch.Tensor.diagonal = _diagonal  # type: ignore[method-assign]
    return torch_xla.device()


def _batch_norm(
    x: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise by running statistics in plain operations: XLA's own kernel has no gradient then."""
    if training or x.device.type != "xla":
        return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, True)
    shape = [1, -1] + [1] * (x.ndim - 2)
    x = (x - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


_torch_diagonal = torch.Tensor.diagonal


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Take the diagonal of [n, n, m], to which XLA gives a wrong shape, row by row."""
    if x.device.type != "xla" or x.ndim != 3 or (offset, dim1, dim2) != (0, 0, 1):
        return _torch_diagonal(x, offset, dim1, dim2)
    return torch.stack([x[i, i] for i in range(len(x))], dim=-1)


def row(name: str, guard: bool, device: torch.device) -> dict[str, Any]:
    """Return one row of the table in docs/devices.md."""
    watched = {"guard": True, "calibrate": labelled()} if guard else {}
    one = subject(name, layout="as_is", **watched)
    if guard:
        one.batches = [_with_bad_images(batch) for batch in one.batches]
    here, there = one.adapt(), one.adapt()
    there.to(device)
    pairs = [(here(batch), there(batch.to(device)).cpu()) for batch in one.batches[:STEPS]]
    ours, theirs = here.state_dict(), {key: value.cpu() for key, value in there.state_dict().items()}
    back, forth = _travelled(one, there), _travelled(one, here).to(device)
    kept = [(theirs, back.state_dict()), (ours, forth.state_dict())]
    batch = one.batches[STEPS]
    return {
        "logits": max(_difference(a, b) for a, b in pairs),
        "state": max(_difference(value, theirs[key]) for key, value in ours.items()),
        "exact": [all(torch.equal(value, after[key].cpu()) for key, value in before.items()) for before, after in kept],
        "to_cpu": _difference(there(batch.to(device)).cpu(), back(batch)),
        "to_device": _difference(here(batch), forth(batch.to(device)).cpu()),
        "events": _events(here) == _events(there),
    }


def _with_bad_images(batch: Tensor) -> Tensor:
    """Give a batch one image with NaN, a constant one, and a copy: the guard takes them out."""
    batch = batch.clone()
    batch[1, 0, 0, 0], batch[3], batch[6] = math.nan, 0.5, batch[5].clone()
    return batch


def _travelled(one: Subject, model: Any) -> Any:
    """Save a model and load it on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        return one.load(model.save(Path(folder) / "snapshot"))


def _events(model: Any) -> dict[str, int] | None:
    return None if model.guard is None else model.guard.counts


def _difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors, relative for values above 1; two equal infinities differ by 0."""
    if first.shape != second.shape:
        return math.inf
    a, b = first.double(), second.double()
    apart = torch.where(a == b, 0.0, (a - b).abs() / a.abs().clamp(min=1))
    return float(apart.max()) if apart.numel() else 0.0


def measured(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one row in a process of its own; return it, or the first line of what went wrong."""
    command = [sys.executable, __file__, "--device", args.device, "--task", task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished in {args.timeout} seconds"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"error": lines[0] if lines else f"exit code {done.returncode}"}


def main(words: Sequence[str] | None = None) -> int:
    """Run every row that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="xla", help="xla, or any name that torch knows")
    parser.add_argument("--out", type=Path, default=Path("other_device.json"), help="file to write and to continue")
    parser.add_argument("--methods", nargs="*", help="default: all")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one method")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.task:
        name, _, guard = args.task.partition(" ")
        print(json.dumps(row(name, bool(guard), device_called(args.device))))
        return 0
    about = origin(f"python benchmarks/other_device.py --device {args.device} --out {args.out}")
    found = json.loads(args.out.read_text()) if args.out.exists() else {"rows": {}}
    chosen = args.methods or names()
    for task in chosen + [f"{name} guarded" for name in GUARDED if name in chosen]:
        if "logits" not in found["rows"].get(task, {}):
            found["rows"][task] = measured(task, args)
            print(task, found["rows"][task], flush=True)
            args.out.write_text(json.dumps(about | found, indent=1) + "\n")
    return any("error" in one for one in found["rows"].values())


if __name__ == "__main__":
    sys.exit(main())
