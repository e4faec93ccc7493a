"""Tiny data sets in the layouts of the real ones: coloured shapes, seeded, a class being a shape and a colour.

They can be learned: a small network trained on one domain does well on it and worse on another, whose background,
brightness and noise differ. Every function returns the folder to hand to `open_benchmark`.
"""

import colorsys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from dpl.data.facts import CIFAR10_CLASSES, CIFAR100_CLASSES, CORRUPTIONS, DOMAIN_FOLDERS

SHAPES = ("disc", "square", "triangle", "cross", "ring")
BACKGROUNDS = ((20, 20, 30), (225, 220, 210), (110, 140, 110), (130, 120, 150))


def shape_image(label: int, classes: int, domain: int, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """Draw one example of a class in the manner of a domain, at a random place and size."""
    red, green, blue = colorsys.hsv_to_rgb(label / classes, 0.9, (0.95, 0.6, 0.8, 0.7)[domain % 4])
    colour = (int(red * 255), int(green * 255), int(blue * 255))
    image = Image.new("RGB", (size, size), BACKGROUNDS[domain % 4])
    radius = size * rng.uniform(0.25, 0.4)
    x, y = rng.uniform(radius, size - radius, size=2)
    _draw(ImageDraw.Draw(image), SHAPES[label % len(SHAPES)], (x, y), radius, colour)
    noise = rng.normal(0, 4 + 6 * (domain % 4), (size, size, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _draw(pen: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], r: float, colour: tuple[int, ...]) -> None:
    x, y = centre
    box = (x - r, y - r, x + r, y + r)
    if shape == "disc":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif shape == "cross":
        pen.line([(x - r, y), (x + r, y)], fill=colour, width=max(2, int(r / 2)))
        pen.line([(x, y - r), (x, y + r)], fill=colour, width=max(2, int(r / 2)))
    else:
        pen.ellipse(box, outline=colour, width=max(2, int(r / 3)))


def shape_arrays(
    count: int, classes: int, domain: int = 0, *, size: int = 32, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [count, size, size, 3] and labels, every class about equally often, in random order."""
    rng = np.random.default_rng((seed, domain))
    labels = rng.permutation(np.arange(count) % classes)
    pixels = np.stack([np.asarray(shape_image(int(label), classes, domain, rng, size)) for label in labels])
    return pixels, labels


def make_class_folders(
    folder: Path, classes: Sequence[str], *, domain: int = 0, per_class: int = 3, size: int = 32, seed: int = 0,
    extension: str = "jpg", prefix: str = "pic",
) -> Path:  # fmt: skip
    """Write `<folder>/<class>/<prefix>_<class number>_<number>.<extension>`."""
    rng = np.random.default_rng((seed, domain))
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            image = shape_image(label, len(classes), domain, rng, size)
            image.save(folder / name / f"{prefix}_{label:03d}_{number:03d}.{extension}", **_quality(extension))
    return folder


def _quality(extension: str) -> dict[str, int]:
    return {"quality": 95} if extension.lower() in {"jpg", "jpeg"} else {}


def _make_domains(root: Path, key: str, folder: str, renamed: dict[str, str], **options: int) -> Path:
    facts = DOMAIN_FOLDERS[key]
    for number, domain in enumerate(facts.counts):
        make_class_folders(root / folder / renamed.get(domain, domain), facts.classes, domain=number, **options)
    return root


def make_pacs(root: Path, *, per_class: int = 3, size: int = 32, seed: int = 0) -> Path:
    """Write PACS: 4 domains, 7 classes."""
    return _make_domains(root, "pacs", "PACS", {}, per_class=per_class, size=size, seed=seed)


def make_vlcs(root: Path, *, per_class: int = 3, size: int = 32, seed: int = 0) -> Path:
    """Write VLCS: 4 domains, 5 classes."""
    return _make_domains(root, "vlcs", "VLCS", {}, per_class=per_class, size=size, seed=seed)


def make_office_home(
    root: Path, *, folder: str = "office_home", real_world: str = "Real World", per_class: int = 1, size: int = 32,
    seed: int = 0,
) -> Path:  # fmt: skip
    """Write OfficeHome: 4 domains, 65 classes."""
    renamed = {"Real World": real_world}
    return _make_domains(root, "officehome", folder, renamed, per_class=per_class, size=size, seed=seed)


def make_terra_incognita(root: Path, *, per_class: int = 2, size: int = 32, seed: int = 0) -> Path:
    """Write TerraIncognita: 4 locations, 10 classes."""
    return _make_domains(root, "terraincognita", "terra_incognita", {}, per_class=per_class, size=size, seed=seed)


def make_domainnet126(
    root: Path, *, classes: int = 6, per_class: int = 3, size: int = 32, seed: int = 0, line_end: str = "\r\n"
) -> Path:
    """Write DomainNet-126 with fewer classes: 4 domains and their list files, CRLF as in the published ones."""
    names = [f"thing_{label:03d}" for label in range(classes)]
    home = root / "DomainNet-126"
    for number, domain in enumerate(("clipart", "painting", "real", "sketch")):
        make_class_folders(
            home / domain, names, domain=number, per_class=per_class, size=size, seed=seed, prefix=domain
        )
        images = sorted((home / domain).glob("*/*.jpg"))
        order = np.random.default_rng((seed, number)).permutation(len(images))
        lines = [f"{images[i].relative_to(home).as_posix()} {names.index(images[i].parent.name)}" for i in order]
        (home / f"{domain}_list.txt").write_bytes(line_end.join(lines).encode())
    return root


def make_cifar_c(
    root: Path, *, classes: int = 10, per_severity: int = 40, corruptions: Sequence[str] = CORRUPTIONS, seed: int = 0
) -> Path:
    """Write CIFAR-10-C (or CIFAR-100-C for 100 classes): five severities one after the other in each file."""
    home = root / f"CIFAR-{classes}-C"
    home.mkdir(parents=True, exist_ok=True)
    clean, labels = shape_arrays(per_severity, classes, seed=seed)
    np.save(home / "labels.npy", np.tile(labels, 5).astype(np.uint8))
    for number, corruption in enumerate(corruptions):
        np.save(home / f"{corruption}.npy", np.concatenate([_damage(clean, s, (seed, number)) for s in range(1, 6)]))
    return root


def _damage(clean: np.ndarray, severity: int, seed: tuple[int, int]) -> np.ndarray:
    """Less contrast and more noise with each severity; in what proportion depends on the corruption."""
    rng = np.random.default_rng((*seed, severity))
    contrast = 1 - 0.12 * severity * ((seed[1] % 3) / 2)
    noisy = (clean - 127.5) * contrast + 127.5 + rng.normal(0, 6 * severity * (1 - (seed[1] % 3) / 3), clean.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


def make_cifar(
    root: Path, form: str = "npz", *, classes: int = 10, split: str = "test", count: int = 40, seed: int = 0
) -> Path:
    """Write clean CIFAR-10 or CIFAR-100 in one of its readable forms: "npz", "binary" or "folders"."""
    names = CIFAR10_CLASSES if classes == 10 else CIFAR100_CLASSES
    root.mkdir(parents=True, exist_ok=True)
    if form == "folders":
        make_class_folders(
            root / f"cifar{classes}" / split, names, per_class=count // classes, seed=seed, extension="png"
        )
        return root
    pixels, labels = shape_arrays(count, classes, seed=seed)
    if form == "npz":
        np.savez_compressed(
            root / f"cifar{classes}_{split}.npz", images=pixels, labels=labels.astype(np.uint8), classes=names
        )
    else:
        _write_records(root, classes, split, pixels, labels)
    return root


def _write_records(root: Path, classes: int, split: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """One record: for CIFAR-100 a coarse label that must be passed over, the label, three colour planes."""
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    head = [labels[:, None]] if classes == 10 else [np.full((len(labels), 1), 7), labels[:, None]]
    records = np.concatenate([*head, planes], axis=1).astype(np.uint8)
    home = root / ("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    home.mkdir(exist_ok=True)
    if classes == 10 and split == "train":
        for number, part in enumerate(np.array_split(records, 5), start=1):
            (home / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    else:
        (home / ("test_batch.bin" if classes == 10 else f"{split}.bin")).write_bytes(records.tobytes())


def make_imagenet(
    root: Path, *, classes: Sequence[str] = ("0000", "0001", "0002", "0003"), per_class: int = 3, seed: int = 0
) -> Path:
    """Write validation images in `imagenet2012/val/<class>`; the labels follow from numbers as folder names."""
    make_class_folders(
        root / "imagenet2012" / "val",
        classes,
        per_class=per_class,
        seed=seed,
        extension="JPEG",
        prefix="ILSVRC2012_val",
    )
    return root


def make_imagenet_c(
    root: Path, *, classes: Sequence[str] = ("0000", "0001", "0002", "0003"), corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (5,), per_class: int = 3, size: int = 32, seed: int = 0,
) -> Path:  # fmt: skip
    """Write `ImageNet-C/<corruption>/<severity>/<class>`: under every corruption the same image names."""
    for number, corruption in enumerate(corruptions):
        for severity in severities:
            make_class_folders(
                root / "ImageNet-C" / corruption / str(severity), classes, domain=number, per_class=per_class,
                size=size, seed=seed, extension="JPEG", prefix="ILSVRC2012_val",
            )  # fmt: skip
    return root


def make_folder(
    root: Path, *, labelled: bool = True, classes: Sequence[str] = ("cat", "dog"), per_class: int = 3, seed: int = 0
) -> Path:
    """Write a user's own folder: one sub-folder per class, or all images in one place."""
    folder = make_class_folders(root / "mine", classes, per_class=per_class, seed=seed)
    if not labelled:
        for image in sorted(folder.glob("*/*.jpg")):
            image.rename(folder / f"{image.parent.name}_{image.name}")
        for name in classes:
            (folder / name).rmdir()
    return folder
