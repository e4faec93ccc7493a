"""CIFAR-10 and CIFAR-100, clean (binary, `.npz` or image folders) and corrupted (the `.npy` files of the -C sets)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpl.core.errors import DataError, SettingError
from dpl.data.arrays import read_cifar_records, read_npy, read_npz
from dpl.data.facts import CIFAR10_CLASSES, CIFAR100_CLASSES, CORRUPTIONS, EXTRA_CORRUPTIONS
from dpl.data.folders import find_home, layout_error, open_folder, shorten, sub_folders, warn_counts
from dpl.data.sets import Arrays, Benchmark, ImageSet, choose_domains, normalise_name

__all__ = ["CIFAR10", "CIFAR100", "Cifar", "open_cifar", "open_cifar10_1", "open_cifar_c"]

_SEVERITIES = 5
_COUNTS = {"test": 10_000, "train": 50_000}


@dataclass(frozen=True)
class Cifar:
    """Names, classes and files of CIFAR-10 or CIFAR-100."""

    name: str
    classes: tuple[str, ...]
    binary_folder: str
    binary_files: dict[str, tuple[str, ...]]
    label_bytes: int
    pickled_folder: str


CIFAR10 = Cifar(
    name="CIFAR-10",
    classes=CIFAR10_CLASSES,
    binary_folder="cifar-10-batches-bin",
    binary_files={"test": ("test_batch.bin",), "train": tuple(f"data_batch_{part}.bin" for part in range(1, 6))},
    label_bytes=1,
    pickled_folder="cifar-10-batches-py",
)
CIFAR100 = Cifar(
    name="CIFAR-100",
    classes=CIFAR100_CLASSES,
    binary_folder="cifar-100-binary",
    binary_files={"test": ("test.bin",), "train": ("train.bin",)},
    label_bytes=2,
    pickled_folder="cifar-100-python",
)


def open_cifar(cifar: Cifar, root: str | os.PathLike[str], *, split: str = "test") -> Benchmark:
    """Open the clean images, `split` "test" or "train", in any readable format, at `root`."""
    if split not in _COUNTS:
        raise SettingError(f"split={split!r}: expected 'test' or 'train'")
    base = Path(root)
    images = _from_npz(cifar, base, split) or _from_binary(cifar, base, split) or _from_folders(cifar, base, split)
    if images is None:
        raise _not_found(cifar, base, split)
    warn_counts(cifar.name, {split: len(images)}, _COUNTS)
    return Benchmark(cifar.name, {split: images}, cifar.classes)


def _from_npz(cifar: Cifar, base: Path, split: str) -> ImageSet | None:
    wanted = normalise_name(f"{cifar.name}{split}")
    files = sorted(base.glob("*.npz")) if base.is_dir() else [base] if base.suffix == ".npz" else []
    path = next((file for file in files if file == base or normalise_name(file.stem) == wanted), None)
    if path is None:
        return None
    arrays = read_npz(path)
    if "classes" in arrays and tuple(map(str, arrays["classes"])) != cifar.classes:
        raise DataError(f"{path}: its classes are not those of {cifar.name} in the usual (alphabetical) order")
    return _array_set(f"{cifar.name}/{split}", cifar, arrays["images"], arrays["labels"], path)


def _from_binary(cifar: Cifar, base: Path, split: str) -> ImageSet | None:
    files = cifar.binary_files[split]
    home = next((h for h in (base / cifar.binary_folder, base) if (h / files[0]).is_file()), None)
    if home is None:
        return None
    parts = [read_cifar_records(home / file, cifar.label_bytes) for file in files]
    pixels, labels = (np.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    return _array_set(f"{cifar.name}/{split}", cifar, pixels, labels, home)


def _from_folders(cifar: Cifar, base: Path, split: str) -> ImageSet | None:
    homes = (base, base / split, base / cifar.name.lower() / split, base / normalise_name(cifar.name) / split)
    for home in homes:
        if home.is_dir() and set(cifar.classes) <= set(sub_folders(home)):
            return open_folder(home, cifar.classes)
    return None


def _array_set(name: str, cifar: Cifar, pixels: NDArray[np.uint8], labels: NDArray[np.int64], path: Path) -> ImageSet:
    return ImageSet(name, cifar.classes, labels, Arrays(pixels, origin=str(path)))


def _not_found(cifar: Cifar, base: Path, split: str) -> DataError:
    layout = (
        f"  {cifar.binary_folder}/{cifar.binary_files[split][0]}   (the 'binary version' of the authors' page)\n"
        f"  or {normalise_name(cifar.name)}_{split}.npz with images [N, 32, 32, 3] and labels [N]\n"
        f"  or {split}/<class>/*.png for the {len(cifar.classes)} classes"
    )
    if base.name == cifar.pickled_folder or (base / cifar.pickled_folder).is_dir():
        problem = (
            f"{base}: only the 'python version' of {cifar.name} is here ({cifar.pickled_folder}). Its files are "
            "pickles, which can run any code when they are read, so they are not read; get the binary version"
        )
        return layout_error(problem, layout)
    problem = f"{cifar.name} ({split}) was not found here" if base.exists() else "no such folder"
    return layout_error(f"{base}: {problem}", layout)


def open_cifar10_1(root: str | os.PathLike[str]) -> Benchmark:
    """Open CIFAR-10.1, 2,000 newer test images for CIFAR-10 networks (version 6)."""
    stem, count = "cifar10.1_v6", 2_000
    layout = f"  CIFAR-10.1/\n    {stem}_data.npy, {stem}_labels.npy"
    names = ("CIFAR-10.1", "datasets")
    home = find_home(root, names, lambda folder: (folder / f"{stem}_data.npy").is_file(), layout)
    if not (home / f"{stem}_labels.npy").is_file():
        raise layout_error(f"{home}: {stem}_labels.npy is missing", layout)
    pixels, labels = read_npy(home / f"{stem}_data.npy"), read_npy(home / f"{stem}_labels.npy")
    images = _array_set("CIFAR-10.1", CIFAR10, np.asarray(pixels), np.asarray(labels), home)
    warn_counts("CIFAR-10.1", {"test": len(images)}, {"test": count})
    return Benchmark("CIFAR-10.1", {"test": images}, CIFAR10.classes)


def open_cifar_c(
    cifar: Cifar, root: str | os.PathLike[str], *, domains: Sequence[str] | None = None, severity: int = 5
) -> Benchmark:
    """Open CIFAR-10-C or CIFAR-100-C at one severity; each corruption is a domain, the usual fifteen by default."""
    if severity not in range(1, _SEVERITIES + 1):
        raise SettingError(f"severity={severity!r}: expected a whole number from 1 to {_SEVERITIES}")
    title = f"{cifar.name}-C"
    wanted = choose_domains(title, domains, CORRUPTIONS if domains is None else CORRUPTIONS + EXTRA_CORRUPTIONS)
    layout = f"  {title}/\n    labels.npy\n    gaussian_noise.npy, shot_noise.npy, ... (one file per corruption)"
    home = find_home(root, (title,), lambda folder: any((folder / f"{c}.npy").is_file() for c in wanted), layout)
    missing = [name for name in ("labels", *wanted) if not (home / f"{name}.npy").is_file()]
    if missing:
        raise layout_error(f"{home}: {shorten(f'{name}.npy' for name in missing)} missing", layout)
    labels = read_npy(home / "labels.npy")
    sets = {corruption: _severity(cifar, home / f"{corruption}.npy", labels, severity) for corruption in wanted}
    warn_counts(title, {name: len(images) for name, images in sets.items()}, dict.fromkeys(wanted, _COUNTS["test"]))
    return Benchmark(title, sets, cifar.classes)


def _severity(cifar: Cifar, path: Path, labels: NDArray[np.int64], severity: int) -> ImageSet:
    """Return one fifth of a corruption's file: the severities follow one another."""
    pixels = read_npy(path)
    size = len(pixels) // _SEVERITIES if pixels.ndim else 0
    if size == 0 or len(pixels) != size * _SEVERITIES or len(labels) not in (size, len(pixels)):
        raise DataError(
            f"{path}: {list(pixels.shape)} with {len(labels)} labels; expected five severities of equal length, one "
            "after the other, and labels.npy of the same length"
        )
    rows = slice((severity - 1) * size, severity * size)
    chosen = labels if len(labels) == size else labels[rows]
    name = f"{cifar.name}-C/{path.stem}/{severity}"
    return ImageSet(name, cifar.classes, np.asarray(chosen), Arrays(pixels[rows], origin=str(path)))
