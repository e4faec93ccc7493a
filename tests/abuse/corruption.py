"""Damaged snapshots, and files that try to run code."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from abuse.streams import network
from abuse.subjects import adapted

Damage = Callable[[bytes], bytes]
Offer = Callable[[Path, Path], Any]


def damages(victim: Path, other: Path, cuts: int, flips: int, rng: random.Random) -> list[tuple[Path, Damage]]:
    """Cut at many places, flip one bit at many, swap with another snapshot's files, empty, fill with zeros."""
    made: list[tuple[Path, Damage]] = []
    for name in ("state.safetensors", "manifest.json"):
        path = victim / name
        size = path.stat().st_size
        made += [(path, _cut(rng.randrange(size))) for _ in range(cuts // 2)]
        made += [(path, _flip(rng.randrange(8 * size))) for _ in range(flips // 2)]
        made += [(path, lambda _: b""), (path, lambda data: bytes(len(data))), (path, lambda data: data + b"\0")]
    foreign = bytes(reversed((other / "state.safetensors").read_bytes()))
    return [*made, (victim / "state.safetensors", lambda _: foreign)]


def _cut(size: int) -> Damage:
    return lambda data: data[:size]


def _flip(bit: int) -> Damage:
    return lambda data: data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@contextmanager
def applied(path: Path, damage: Damage) -> Iterator[None]:
    """Damage a file for the length of the block."""
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    try:
        yield
    finally:
        path.write_bytes(whole)


class _Bait:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def bait(proof: Path) -> bytes:
    """A pickle that creates the file `proof` when it is loaded."""
    return pickle.dumps(_Bait(proof))


def as_tensors_of_a_snapshot(folder: Path, proof: Path) -> Any:
    import dpl

    path = adapted("tent").save(folder / "one")
    (path / "state.safetensors").write_bytes(bait(proof))
    return dpl.load(path, network())


def as_manifest_of_a_snapshot(folder: Path, proof: Path) -> Any:
    import dpl

    path = adapted("tent").save(folder / "one")
    (path / "manifest.json").write_bytes(bait(proof))
    return dpl.load(path, network())


def as_distributed_checkpoint(folder: Path, proof: Path) -> Any:
    """The metadata of torch.distributed.checkpoint is a pickle."""
    import dpl

    (folder / "one").mkdir()
    (folder / "one" / ".metadata").write_bytes(bait(proof))
    return dpl.load(folder / "one", network())


def as_checkpoint(folder: Path, proof: Path) -> Any:
    from dpl.backbones.weights import read_checkpoint

    (folder / "weights.pth").write_bytes(bait(proof))
    return read_checkpoint(folder / "weights.pth")


def as_checkpoint_of_torch(folder: Path, proof: Path) -> Any:
    from dpl.backbones.weights import read_checkpoint

    torch.save({"state_dict": _Bait(proof)}, folder / "weights.pth")
    return read_checkpoint(folder / "weights.pth")


def as_experiment_file(folder: Path, proof: Path) -> Any:
    from dpl.bench.section import read_sections

    path = folder / "grid.yaml"
    tag = "!!python/object/apply:pathlib.Path"
    path.write_text(f"methods: {tag}.touch\n  - {tag} ['{proof}']\n")
    return read_sections(path)


def as_array(folder: Path, proof: Path) -> Any:
    import numpy as np

    from dpl.data.arrays import read_npy

    np.save(folder / "images.npy", np.array([_Bait(proof)], dtype=object), allow_pickle=True)
    return read_npy(folder / "images.npy")


MALICIOUS: list[Offer] = [
    as_tensors_of_a_snapshot,
    as_manifest_of_a_snapshot,
    as_distributed_checkpoint,
    as_checkpoint,
    as_checkpoint_of_torch,
    as_experiment_file,
    as_array,
]
