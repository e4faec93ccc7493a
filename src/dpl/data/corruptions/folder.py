"""A folder of images and all its corrupted copies, laid out as ImageNet-C."""

import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from dpl.core.errors import DataError, DplError, SettingError
from dpl.core.files import replacing
from dpl.data.corruptions.apply import check_settings, corrupt, is_small
from dpl.data.corruptions.arrays import Images
from dpl.data.corruptions.constants import SEVERITIES
from dpl.data.corruptions.record import Progress, keep_record
from dpl.data.facts import CORRUPTIONS
from dpl.data.images import decode, image_names
from dpl.data.transforms import Transform, unchanged

__all__ = ["FolderReport", "corrupt_folder"]

_PNG: dict[str, Any] = {"format": "PNG"}
_JPEG: dict[str, Any] = {"format": "JPEG", "quality": 85, "optimize": True}  # as published


@dataclass
class FolderReport:
    """Result of `corrupt_folder`.

    `written` and `present` count files made now and files that were there already; `unusable` names the images that
    could not be used, each with the reason.
    """

    written: int = 0
    present: int = 0
    unusable: dict[str, str] = field(default_factory=dict)


def corrupt_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    constants: str = "auto",
    transform: Transform | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> FolderReport:
    """Write `target/<corruption>/<severity>/<path below source>` for every image below `source`.

    Images of up to 64 pixels a side become PNG files, larger ones JPEG of quality 85, as published. An
    interrupted call can be repeated: files that exist are complete and are kept. An image that cannot be read is
    skipped and named in the report.

    Args:
        source: a folder of images, with any sub-folders.
        target: folder to write to; must not be inside `source`.
        names: corruptions, the usual fifteen by default.
        severities: some of 1 to 5.
        seed: with an image's path below `source` it determines all random draws of its copies.
        constants: see `corrupt`.
        transform: applied before the corruption; `dpl.data.resize_crop(256, 224)` is what ImageNet-C did.
        workers: number of threads.
        progress: called after each image with the number done and the number of all images.

    """
    check_settings(names, severities, seed=seed, constants=constants)
    if workers < 1:
        raise SettingError(f"workers={workers}: expected a number of threads from 1 upwards.")
    base, goal = Path(source), Path(target)
    if goal.resolve().is_relative_to(base.resolve()):
        raise SettingError(f"target={str(goal)!r} is inside source={str(base)!r}: choose a folder outside of it.")
    files = image_names(base, recursive=True)
    if not files:
        raise DataError(f"{base}: no image here or in its sub-folders")
    change = transform or unchanged()
    keep_record(goal, {"seed": seed, "constants": constants, "transform": str(change)})
    kinds = tuple((name, severity) for name in dict.fromkeys(names) for severity in sorted(set(severities)))
    return _run(_Copier(base, goal, kinds, change, seed, constants, _shared_stems(files)), files, workers, progress)


def _shared_stems(files: list[str]) -> frozenset[str]:
    """Return the names that are the same up to the extension."""
    counts = Counter(os.path.splitext(name)[0] for name in files)
    return frozenset(stem for stem, count in counts.items() if count > 1)


@dataclass(frozen=True)
class _Copier:
    """Makes all corrupted copies of one image at a time."""

    source: Path
    target: Path
    kinds: tuple[tuple[str, int], ...]
    transform: Transform
    seed: int
    constants: str
    shared_stems: frozenset[str]

    def copy(self, name: str) -> tuple[int, int] | str:
        """Return how many copies were written and how many were there, or why the image cannot be used."""
        try:
            pixels = self.transform.pixels(decode(self.source / name, as_stored=True))
            missing = [kind for kind in self.kinds if not self._path(name, kind, pixels).exists()]
            for kind in missing:
                self._write(name, kind, pixels)
        except DplError as error:
            return str(error)
        return len(missing), len(self.kinds) - len(missing)

    def _write(self, name: str, kind: tuple[str, int], pixels: Images) -> None:
        number = zlib.crc32(name.encode())  # from the name, so that other files in the folder change nothing
        result = corrupt(pixels[None], *kind, seed=self.seed, start=number, constants=self.constants)
        with replacing(self._path(name, kind, pixels)) as draft:
            Image.fromarray(result[0]).save(draft, **(_PNG if is_small(pixels) else _JPEG))

    def _path(self, name: str, kind: tuple[str, int], pixels: Images) -> Path:
        path = PurePosixPath(name)
        fitting = (".png",) if is_small(pixels) else (".jpg", ".jpeg")
        if path.suffix.lower() not in fitting:
            shared = os.path.splitext(name)[0] in self.shared_stems
            # Two images that differ only in the extension keep it; otherwise one copy would overwrite the other.
            path = path.with_suffix((path.suffix if shared else "") + fitting[0])
        return self.target / kind[0] / str(kind[1]) / path


def _run(copier: _Copier, files: list[str], workers: int, progress: Progress | None) -> FolderReport:
    report = FolderReport()
    for done, (name, outcome) in enumerate(zip(files, _outcomes(copier, files, workers), strict=True), start=1):
        if isinstance(outcome, str):
            report.unusable[name] = outcome
        else:
            report.written += outcome[0]
            report.present += outcome[1]
        if progress is not None:
            progress(done, len(files))
    return report


def _outcomes(copier: _Copier, files: list[str], workers: int) -> Iterator[tuple[int, int] | str]:
    if workers == 1:
        yield from map(copier.copy, files)
        return
    with ThreadPoolExecutor(workers) as pool:
        try:
            yield from pool.map(copier.copy, files)
        finally:  # an interrupt must not wait for the images that are still queued
            pool.shutdown(wait=False, cancel_futures=True)
