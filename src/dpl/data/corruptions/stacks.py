"""One array file per corruption with the five severities stacked, laid out as CIFAR-10-C."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpl.core.errors import InputError
from dpl.core.files import replacing
from dpl.data.corruptions.apply import check_images, check_settings, corrupt
from dpl.data.corruptions.arrays import Images
from dpl.data.corruptions.constants import SEVERITIES
from dpl.data.corruptions.record import Progress, keep_record
from dpl.data.facts import CORRUPTIONS

__all__ = ["corrupt_arrays"]


def corrupt_arrays(
    images: Images,
    labels: NDArray[Any],
    target: str | os.PathLike[str],
    *,
    names: Sequence[str] = CORRUPTIONS,
    seed: int = 0,
    constants: str = "auto",
    progress: Progress | None = None,
) -> list[Path]:
    """Write `<corruption>.npy`, severities 1 to 5 one after the other ([5 * N, H, W, 3]), and `labels.npy`.

    An interrupted call can be repeated: files that exist are complete and are kept. Returns the paths of all files.

    Args:
        images: uint8 [N, H, W, 3].
        labels: whole numbers [N]; written five times over, as published.
        target: folder to write to.
        names: corruptions, the usual fifteen by default.
        seed: see `corrupt`; image i has the number i.
        constants: see `corrupt`.
        progress: called after each corruption with the number done and the number of all corruptions.

    """
    check_settings(names, SEVERITIES, seed=seed, constants=constants)
    check_images(images)
    repeated = _five_times(np.asarray(labels), len(images))
    folder = Path(target)
    checksum = zlib.crc32(np.ascontiguousarray(images).data)
    keep_record(folder, {"seed": seed, "constants": constants, "images_crc32": checksum})
    with replacing(folder / "labels.npy") as draft, draft.open("wb") as file:
        np.save(file, repeated, allow_pickle=False)
    paths = [folder / f"{name}.npy" for name in names]
    for done, (name, path) in enumerate(zip(names, paths, strict=True), start=1):
        if not path.exists():
            _write(path, images, name, seed, constants)
        if progress is not None:
            progress(done, len(paths))
    return [folder / "labels.npy", *paths]


def _five_times(labels: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the labels once per severity, as bytes where they fit."""
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"labels: expected {count} whole numbers, one per image, got {labels.dtype} of shape {list(labels.shape)}."
        )
    if count and labels.min() < 0:
        raise InputError(f"labels: expected class numbers from 0 upwards, got {labels.min()}.")
    smallest = np.uint8 if not count or labels.max() < 256 else np.int64
    return np.tile(labels.astype(smallest), len(SEVERITIES))


def _write(path: Path, images: Images, name: str, seed: int, constants: str) -> None:
    shape = (len(SEVERITIES) * len(images), *images.shape[1:])
    with replacing(path) as draft:
        stack = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=shape)
        for severity in SEVERITIES:
            rows = slice((severity - 1) * len(images), severity * len(images))
            stack[rows] = corrupt(images, name, severity, seed=seed, constants=constants)
        stack.flush()
        del stack  # closes the file, which some systems need before it can be renamed
