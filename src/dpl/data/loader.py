"""Batches of images as tensors, decoded ahead by threads; the number of threads does not change them.

Threads are faster than processes here: Pillow decodes outside Python's lock, and nothing is copied between processes.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dpl.core.errors import DataError, SettingError
from dpl.data.cache import cached, sizes_differ
from dpl.data.sets import Arrays, ImageSet, Indices, checked_indices
from dpl.data.transforms import Augmentation, Evaluation, Pixels, Transform, to_float, unchanged

__all__ = ["Batch", "batches", "decode_into", "training_batches"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """Images with labels and indices; row i of each tensor belongs to image i.

    Images that could not be read are only in `failed`, as (path, reason). A batch may therefore be smaller than asked
    for, or empty (images [0, 3, 0, 0]).
    """

    images: Tensor  # [B, 3, H, W], float, 0 to 1
    labels: Tensor  # [B], int64, -1: not known
    indices: Tensor  # [B], int64: the position in the set
    domains: Tensor  # [B], int64: the number of the training set; 0 otherwise
    failed: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class _Pick:
    """One image to be read; `draw` seeds its augmentation."""

    image_set: ImageSet
    index: int
    domain: int = 0
    draw: tuple[int, ...] | None = None

    def read(self, transform: Transform) -> Pixels | DataError:
        """Return the pixels, or the error, which is reported in order."""
        try:
            generator = None if self.draw is None else np.random.default_rng(self.draw)
            return transform.pixels(self.image_set.load(self.index), generator)
        except DataError as error:
            location = self.image_set.location(self.index)
            return error if str(error).startswith(location) else DataError(f"{location}: {error}")


def batches(
    image_set: ImageSet,
    indices: ArrayLike | None,
    transform: Transform,
    batch_size: int,
    *,
    workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    on_error: str = "skip",
    prefetch: int = 2,
) -> Iterator[Batch]:
    """Yield the images at `indices` (None: all) in that order, `batch_size` at a time; the last batch may be smaller.

    `workers` threads read up to `prefetch` batches ahead. `cache` is a folder for decoded images: the whole set is
    decoded into it first. An image that cannot be read is skipped and reported ("skip") or raises DataError ("raise").
    """
    _check(workers=workers, prefetch=prefetch, on_error=on_error, batch_size=batch_size)
    if isinstance(transform, Augmentation):
        raise SettingError("transform: a random one belongs to training_batches; use square, resize_crop or unchanged")
    chosen = checked_indices(indices, len(image_set))
    if cache is not None and not _is_ready(image_set, transform):
        held = decode_into(image_set, transform, Path(cache), workers)
        image_set, transform = (image_set, transform) if held is None else (held, unchanged())
    groups = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
    if isinstance(image_set.source, Arrays) and _is_ready(image_set, transform):
        read = partial(_read_rows, image_set, image_set.source, on_error)
        return in_order(read, groups, workers=workers, ahead=prefetch)
    steps = ([_Pick(image_set, int(index)) for index in group] for group in groups)
    return _decoded(steps, transform, batch_size, workers, prefetch, on_error)


def training_batches(
    sets: Sequence[ImageSet],
    transform: Transform,
    *,
    per_domain: int = 32,
    seed: int = 0,
    start_step: int = 0,
    rows: slice | None = None,
    workers: int = 0,
    prefetch: int = 2,
    on_error: str = "raise",
) -> Generator[Batch, None, None]:
    """Yield batches without end: `per_domain` images of each set, drawn with replacement, the sets one after the other.

    Step k depends only on the seed and k, so that `start_step` resumes a run exactly. With `rows`, only these rows of
    each batch are read; other processes read the others.
    """
    _check(workers=workers, prefetch=prefetch, on_error=on_error, per_domain=per_domain)
    if seed < 0 or start_step < 0:
        raise SettingError(f"seed={seed}, start_step={start_step}: expected whole numbers from 0")
    if not sets or any(len(image_set) == 0 for image_set in sets):
        raise SettingError(f"sets: {[len(image_set) for image_set in sets]} images; expected at least one in each")
    whole = range(per_domain * len(sets))
    size = len(whole if rows is None else whole[rows])
    if size == 0:
        raise SettingError(f"rows={rows}: none of the {len(whole)} images of a batch")
    steps = (_draw(sets, per_domain, seed, step)[rows or slice(None)] for step in count(start_step))
    return _decoded(steps, transform, size, workers, prefetch, on_error)


def _check(*, on_error: str, workers: int, prefetch: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise SettingError(f"{name}={value}: expected a positive number of images")
    if workers < 0 or prefetch < 0:
        raise SettingError(f"workers={workers}, prefetch={prefetch}: expected numbers from 0")
    if on_error not in ("skip", "raise"):
        raise SettingError(f"on_error={on_error!r}: expected 'skip' or 'raise'")


def _is_ready(image_set: ImageSet, transform: Transform) -> bool:
    """Whether the pixels are in an array and need no transform."""
    return isinstance(image_set.source, Arrays) and transform == unchanged()


def decode_into(image_set: ImageSet, transform: Transform, folder: Path, workers: int) -> ImageSet | None:
    """Return the set with its transformed pixels from the cache in a folder; None if that cannot be written to."""
    if not isinstance(transform, Evaluation):
        raise SettingError(f"cache: {transform!r} cannot be cached; expected square, resize_crop or unchanged")

    def rows() -> Iterator[Pixels | DataError]:
        picks = (_Pick(image_set, index) for index in range(len(image_set)))
        return in_order(lambda pick: pick.read(transform), picks, workers=workers, ahead=64)

    return cached(image_set, transform, folder, rows)


def _draw(sets: Sequence[ImageSet], per_domain: int, seed: int, step: int) -> list[_Pick]:
    generator = np.random.default_rng((seed, step))
    drawn = [generator.integers(len(image_set), size=per_domain) for image_set in sets]
    picks = [(domain, int(index)) for domain, indices in enumerate(drawn) for index in indices]
    # counted from 1, because numpy treats (seed, step, 0) as (seed, step)
    return [_Pick(sets[d], index, d, (seed, step, place)) for place, (d, index) in enumerate(picks, start=1)]


def _decoded(
    steps: Iterable[list[_Pick]], transform: Transform, size: int, workers: int, prefetch: int, on_error: str
) -> Generator[Batch, None, None]:
    """Read image by image across batches, so that no thread waits for the last image of a batch."""
    picks = (pick for step in steps for pick in step)
    read = in_order(lambda pick: (pick, pick.read(transform)), picks, workers=workers, ahead=prefetch * size)
    with closing(read):
        while rows := list(islice(read, size)):
            yield _assemble(rows, on_error)


def _assemble(rows: list[tuple[_Pick, Pixels | DataError]], on_error: str) -> Batch:
    failed = [(pick, row) for pick, row in rows if isinstance(row, DataError)]
    if failed and on_error == "raise":
        raise failed[0][1]
    good = [(pick, row) for pick, row in rows if not isinstance(row, DataError)]
    for pick, row in good:
        if row.shape != good[0][1].shape:
            raise sizes_differ(pick.image_set.location(pick.index), row.shape, good[0][1].shape)
    pixels = np.stack([row for _, row in good]) if good else np.empty((0, 0, 0, 3), dtype=np.uint8)
    return Batch(
        images=to_float(pixels),
        labels=_whole([pick.image_set.labels[pick.index] for pick, _ in good]),
        indices=_whole([pick.index for pick, _ in good]),
        domains=_whole([pick.domain for pick, _ in good]),
        failed=tuple(_failure(pick.image_set.location(pick.index), error) for pick, error in failed),
    )


def _read_rows(image_set: ImageSet, source: Arrays, on_error: str, group: Indices) -> Batch:
    """Take a whole batch out of an array at once: no transform has to see the single image."""
    failed: list[tuple[str, str]] = []
    if source.failed:
        bad = np.array([source.row(int(index)) in source.failed for index in group])
        failed = [(source.location(i), source.failed[source.row(i)]) for i in group[bad].tolist()]
        group = group[~bad]
    if failed and on_error == "raise":
        raise DataError(": ".join(failed[0]))
    return Batch(
        images=to_float(source.block(group)),
        labels=torch.from_numpy(image_set.labels[group]),
        indices=torch.from_numpy(group.copy()),
        domains=torch.zeros(len(group), dtype=torch.int64),
        failed=tuple(failed),
    )


def _whole(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _failure(where: str, error: DataError) -> tuple[str, str]:
    return where, str(error).removeprefix(f"{where}: ")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int
) -> Generator[Result, None, None]:
    """Yield `work(item)` for each item in order, with `workers` threads up to `ahead` items before they are asked for.

    Without workers everything happens in the calling thread, at the moment it is asked for.
    """
    if workers == 0:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="dpl-data")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also when the caller stops half-way
        pool.shutdown(wait=True, cancel_futures=True)
