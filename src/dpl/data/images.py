"""Reading one image safely: size checked before decoding, any mode to RGB, one kind of error.

By default an image is decoded as a viewer shows it: the camera's rotation is applied, and transparent parts are put
on white. With `as_stored`, pixels are neither rotated nor blended. The published loaders of the benchmarks do so, and
so do the benchmarks here, to stay comparable.
"""

import io
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from dpl.core.errors import DataError, SettingError

__all__ = ["EXTENSIONS", "MAX_PIXELS", "decode", "image_names", "list_images"]

MAX_PIXELS = 25_000_000
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})

# Named one by one: Pillow knows more formats, some of which start other programs (EPS) or are hardly tested.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_UNTRUSTED_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")  # decoded in C, in memory that the header announces
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of TIFF
_ORIENTATION_TAG = 0x0112
_ROTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(
    source: str | os.PathLike[str] | bytes | BinaryIO,
    *,
    max_pixels: int = MAX_PIXELS,
    as_stored: bool = False,
    name: str | None = None,
    untrusted: bool = False,
) -> Image.Image:
    """Return the image in a file, in bytes or in an open stream as 8-bit RGB, or raise DataError naming it.

    The number of pixels comes from the header and is checked before anything is decoded, so that a small file
    cannot fill the memory. `as_stored` leaves out rotation and blending; `name` is used in messages. `untrusted` is for
    files of strangers: it takes the common formats only, none of which lets a small file cost much time or memory.
    """
    if max_pixels < 1:
        raise SettingError(f"max_pixels={max_pixels}: expected a positive number of pixels")
    label = name or (str(source) if isinstance(source, str | os.PathLike) else "the image")
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    formats = _UNTRUSTED_FORMATS if untrusted else _FORMATS
    try:
        with Image.open(stream, formats=formats) as image:
            _check_size(image, max_pixels)
            if untrusted and any(part[0] == "bmp_rle" for part in image.tile):
                raise DataError("a BMP with run-length encoding; save it without, or as PNG")
            image.load()
            return _to_rgb(image) if as_stored else _on_white(_upright(image))
    except DataError as error:
        raise DataError(f"{label}: {error}") from None
    except FileNotFoundError as error:
        raise DataError(f"{label}: no such file") from error
    except Exception as error:  # damaged bytes make Pillow raise nearly anything, from OSError to IndexError
        raise DataError(f"{label}: {_reason(error, formats)}") from error


def list_images(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[Path]:
    """Return the image files of a folder, sorted by name; with `recursive` sub-folder by sub-folder.

    A file counts by its extension; hidden files (also the `._name.jpg` that macOS leaves behind) do not.
    """
    return [Path(folder, name) for name in image_names(folder, recursive=recursive)]


def image_names(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[str]:
    """Return the same as `list_images`, as names relative to the folder: quicker for a million files."""
    try:
        return _walk(os.fspath(folder), "", recursive)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be listed ({error.strerror}); expected a folder of images"
        ) from error


def _walk(folder: str, prefix: str, recursive: bool) -> list[str]:
    """Files of this folder first, then those of its sub-folders."""
    with os.scandir(folder) as listing:
        entries = sorted((e for e in listing if not e.name.startswith(".")), key=lambda e: e.name)
    names = [prefix + e.name for e in entries if _has_image_extension(e.name) and _is_file_or_dead_link(e)]
    if recursive:  # links to folders are not followed: they may lead in a circle
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                names += _walk(entry.path, f"{prefix}{entry.name}/", recursive)
    return names


def _is_file_or_dead_link(entry: os.DirEntry[str]) -> bool:
    """A dead link stays in the list: reading it names the file, leaving it out would hide a broken copy."""
    return entry.is_file() or (entry.is_symlink() and not entry.is_dir())


def _has_image_extension(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    tags = getattr(image, "tag_v2", {})  # one tile of a TIFF may be larger than the image, and is decoded whole
    if tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0) > max_pixels:
        width, height = tags[_TILE_WIDTH], tags[_TILE_LENGTH]
    if width * height > max_pixels:
        raise DataError(
            f"{width} x {height} = {width * height / 1e6:.1f} megapixels; "
            f"the limit is {max_pixels / 1e6:.1f} (max_pixels). Shrink the image or raise the limit"
        )


def _reason(error: Exception, formats: tuple[str, ...]) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not an image that can be read; expected one of {', '.join(formats)}"
    return f"damaged or cut short ({type(error).__name__}: {error}); copy the file again or leave it out"


def _upright(image: Image.Image) -> Image.Image:
    """Apply the rotation that the camera noted; a damaged note counts as none, as in image viewers."""
    try:
        rotation = _ROTATIONS.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # anything may be wrong in a damaged note; the pixels are sound
        return image
    return image if rotation is None else image.transpose(rotation)


def _on_white(image: Image.Image) -> Image.Image:
    """RGB with transparent parts on white: the colour hidden under full transparency is arbitrary."""
    if image.mode not in {"RGBA", "LA", "PA", "RGBa", "La"} and "transparency" not in image.info:
        return _to_rgb(image)
    layer = _to_8_bit(image).convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image.copy() if image.readonly else image
    return _to_8_bit(image).convert("RGB")


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Keep the upper byte of 16-bit grey values, where Pillow's own conversion would clip all above 255."""
    if image.mode == "F":
        raise DataError("floating-point pixels have no defined white; save the image with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    grey = np.asarray(image).astype(np.int64)
    if grey.min() < 0 or grey.max() > 0xFFFF:
        raise DataError(f"grey values {grey.min()}..{grey.max()} exceed 16 bits; save the image with 8 or 16 bits")
    return Image.fromarray((grey >> 8).astype(np.uint8))
