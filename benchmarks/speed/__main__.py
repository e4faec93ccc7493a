"""Run with `make bench`, or `python -m speed --help` in benchmarks/ for parts; it goes on where it was stopped."""

import argparse
import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpl
from dpl.methods.registry import get_method

from .measure import CLOCKS, Contender, floor_step, runners, source_step, time_in_turns
from .networks import SUBJECTS, confident, make_images, make_network
from .record import Record
from .usual import LR, USUAL

CORE = [
    "source", "norm", "tent", "pl", "shot_im", "eta", "sar", "t3a", "lame", "tsd", "cotta", "domainadaptor", "roid",
    "dpl_o", "dpl_star", "dpl", "dpl_dagger", "dpl_dagger:carry_over", "pl:classifier", "dpl:classifier",
]  # fmt: skip
# Thresholds at which every sample is selected, or every view asked for: what is skipped costs nothing.
EASY = {"margin": 2.0, "max_similarity": 1.1, "plpd_threshold": -1.0, "recovery": 0.0}
ALL_SELECTED: dict[str, dict[str, Any]] = dict.fromkeys(["eta", "eata", "rdumb", "sar", "deyo"], EASY)
ALL_SELECTED |= {"cotta": {"threshold": 1.0}, "rmt": {"warmup_samples": 0}, "swr_nsp": {"epochs": 1}}
Row = dict[str, Any]


def main() -> None:
    """Measure what is not in the file yet, print a table for each network, write JSON."""
    args = _arguments()
    torch.set_num_threads(1)  # a fork of a process with a second thread would wait for it forever
    known = {name: getattr(args, name) for name in ("threads", "clock", "together", "batch", "confident")}
    record = Record(args.out, known | {"torch": torch.__version__})
    for key in args.networks:
        measure_network(key, args.methods or (CORE if args.core else _every_method()), args, record)
    print(f"\nwritten to {args.out}")


def measure_network(key: str, methods: list[str], args: argparse.Namespace, record: Record) -> None:
    """Measure the methods on one network; prints as it goes."""
    subject = SUBJECTS[key] if args.batch is None else dataclasses.replace(SUBJECTS[key], batch=args.batch)
    images = make_images(subject)
    net = make_network(subject, images)
    print(f"\n{key}, {subject.size} pixels, batch {subject.batch}\n{_HEAD}", flush=True)
    for name in methods:
        row = record.find(key, name)
        if row is None or args.again:
            like = {"network": key, "size": subject.size, "batch": subject.batch, "method": name}
            row = record.add(like | measure_method(name, net, images, args))
        print(_line(row), flush=True)


def measure_method(name: str, net: nn.Module, images: Tensor, args: argparse.Namespace) -> Row:
    """Time one method beside its floor, source inference and the usual way."""
    confidence = confident(net, images, args.confident)
    ours = functools.partial(_adapted, name, net, images, confidence)
    contenders = [
        Contender("source", lambda: source_step(copy.deepcopy(net))),
        Contender("ours", ours),
        Contender("floor", lambda: floor_step(copy.deepcopy(net), ours())),
    ]
    if name.startswith("dpl_dagger"):  # which is dpl and more: how much more?
        contenders.append(Contender("dpl", functools.partial(_adapted, "dpl", net, images, confidence)))
    usual = USUAL.get(name.split(":")[0])
    if usual is not None and not name.endswith(":classifier"):
        contenders.append(Contender("usual", lambda: usual(copy.deepcopy(net), confidence), keeps_memory=False))
    else:  # no other way was written: the same code without what makes it fast
        contenders.append(Contender("plain", functools.partial(ours, layout="as_is"), keeps_memory=False))
    with runners(contenders, images, args.clock, args.threads, args.together) as found:
        return time_in_turns(found, len(images), args.rounds, args.patience)


def _adapted(name: str, net: nn.Module, images: Tensor, confidence: float, **options: Any) -> dpl.AdaptiveModel:
    method, _, variant = name.partition(":")
    known = {field.name for field in dataclasses.fields(get_method(method).settings_class)}
    wanted = {"lr": LR, "confidence": confidence} | ALL_SELECTED.get(method, {})
    wanted |= {"scope" if variant == "classifier" else "style": variant or None}
    settings = {key: value for key, value in wanted.items() if key in known and value is not None}
    labels = net(images[:8]).argmax(dim=1)
    source = (images[:8], labels) if get_method(method).info.source != "never" else None
    return dpl.adapt(net, method, source=source, **options, **settings)


def _every_method() -> list[str]:
    convolutional = [name for name in dpl.list_methods() if name != "foa"]  # which needs a transformer
    return [*convolutional, "dpl_dagger:carry_over", "tent+dpl", "pl:classifier", "dpl:classifier"]


_HEAD = (
    f"{'method':24s} {'img/s':>8s} {'x source':>9s} {'x floor':>8s} {'usual/ours':>11s} {'peak MB':>8s} {'usual':>8s}"
)


def _line(row: Row) -> str:
    if "error" in row:
        return f"{row['method']:24s} {row['error'][:80]}"
    other = "usual" if "usual" in row else "plain"
    floor = row["ours"] / row["floor"] if "floor" in row else math.nan
    return (
        f"{row['method']:24s} {1e3 / row['ours']:8.1f} {row['ours'] / row['source']:9.2f} {floor:8.2f} "
        f"{row[other] / row['ours']:10.2f}{'*' if other == 'plain' else ' '} {row['peak_ours']:8.0f} "
        f"{row[f'peak_{other}']:8.0f}" + ("" if row["updated"] or "floor" not in row else "  (took no step)")
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="speed", description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--methods", nargs="+", help="default: every method")
    parser.add_argument("--core", action="store_true", help="the best known methods alone")
    parser.add_argument(
        "--rounds", type=int, default=3, help="at most, and twice as many where the usual way is as fast"
    )
    parser.add_argument("--again", action="store_true", help="more rounds for methods that are in the file already")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a method gets no further round")
    parser.add_argument("--confident", type=float, default=0.5, help="share of a batch that is confident")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--together", action="store_true", help="all in one process (default: each in its own, in turns)"
    )
    parser.add_argument("--batch", type=int, help="images in a batch (default: by network)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--out", type=Path, default=Path("speed.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
