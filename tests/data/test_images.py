"""Decoding: every mode, every rotation, and every way in which a file can be bad."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from dpl.core.errors import DataError, SettingError
from dpl.data.images import MAX_PIXELS, decode, image_names, list_images

RAMP = np.arange(12 * 20 * 3, dtype=np.uint8).reshape(12, 20, 3)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes whose header claims any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "RGBA", "LA", "YCbCr", "I;16"])
@pytest.mark.parametrize("as_stored", [False, True])
def test_every_mode_becomes_8_bit_rgb(mode, as_stored):
    form = "TIFF" if mode in {"CMYK", "LA", "YCbCr"} else "PNG"
    image = Image.fromarray(np.full((5, 7), 40_000, np.uint16)) if mode == "I;16" else Image.new(mode, (7, 5))
    found = decode(encoded(image, form), as_stored=as_stored)
    assert (found.mode, found.size) == ("RGB", (7, 5))


def test_16_bit_grey_is_scaled_and_not_clipped():
    grey = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)
    found = np.asarray(decode(encoded(Image.fromarray(grey), "PNG")))
    np.testing.assert_array_equal(found[..., 0], grey >> 8)


def test_32_bit_values_beyond_16_bits_and_floats_are_refused():
    wide = Image.fromarray(np.full((4, 4), 70_000, np.int32))
    real = Image.fromarray(np.full((4, 4), 0.5, np.float32))
    with pytest.raises(DataError, match=r"deep\.tif: grey values 70000\.\.70000 exceed 16 bits"):
        decode(encoded(wide, "TIFF"), name="deep.tif")
    with pytest.raises(DataError, match=r"real\.tif: floating-point pixels"):
        decode(encoded(real, "TIFF"), name="real.tif")


def test_cmyk_jpeg_has_the_colours_of_the_page():
    red = Image.new("RGB", (16, 16), (255, 0, 0)).convert("CMYK")
    found = np.asarray(decode(encoded(red, "JPEG", quality=95))).astype(int)
    assert found[..., 0].min() > 240
    assert found[..., 1:].max() < 15


def test_transparency_lies_on_white_as_seen_and_is_dropped_as_stored():
    clear = encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0)), "PNG")
    half = encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128)), "PNG")
    assert decode(clear).getpixel((0, 0)) == (255, 255, 255)
    assert decode(clear, as_stored=True).getpixel((0, 0)) == (10, 20, 30)
    assert decode(half).getpixel((0, 0)) == (127, 127, 127)


def test_palette_with_a_transparent_colour_lies_on_white():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 0, 0])
    assert decode(encoded(image, "PNG", transparency=1)).getpixel((0, 0)) == (255, 255, 255)
    assert decode(encoded(image, "PNG")).getpixel((0, 0)) == (200, 0, 0)


@pytest.mark.parametrize("orientation", range(10))
def test_camera_rotation_is_applied_as_seen_only(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(RAMP), "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        expected = ImageOps.exif_transpose(opened)
    np.testing.assert_array_equal(np.asarray(decode(data)), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(decode(data, as_stored=True)), RAMP)


def test_a_damaged_rotation_note_counts_as_none():
    data = encoded(Image.fromarray(RAMP), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xffgarbage")
    np.testing.assert_array_equal(np.asarray(decode(data)), RAMP)


def test_an_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(13_000, 13_000), (5_001, 5_000), (2**31 - 1, 2**31 - 1), (25_000_001, 1)])
def test_size_is_refused_from_the_header(size):
    with pytest.raises(DataError, match=r"bomb\.png"):
        decode(png_claiming(*size), name="bomb.png")


def test_the_limit_is_an_option_and_exact():
    data = encoded(Image.new("RGB", (50, 40)), "PNG")
    assert decode(data, max_pixels=2_000).size == (50, 40)
    with pytest.raises(DataError, match=r"50 x 40 = 0\.0 megapixels; the limit is"):
        decode(data, max_pixels=1_999)
    with pytest.raises(SettingError, match="max_pixels=0"):
        decode(data, max_pixels=0)
    assert MAX_PIXELS == 25_000_000


def test_a_header_that_claims_more_than_the_file_holds():
    with pytest.raises(DataError, match="damaged or cut short"):
        decode(png_claiming(400, 400))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_truncated_files_name_themselves(tmp_path, form, share):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), form)
    path = tmp_path / f"cut.{form.lower()}"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError) as caught:
        decode(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"<!DOCTYPE html><html></html>", b"PK\x03\x04" + b"\0" * 60, b"%!PS-Adobe-3.0 EPSF-3.0\n"],
    ids=["empty", "text", "html", "zip", "eps"],
)
def test_files_that_are_no_images(tmp_path, data):
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"photo\.jpg: not an image that can be read"):
        decode(path)


def test_missing_file_and_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match=r"none\.jpg: no such file"):
        decode(tmp_path / "none.jpg")
    with pytest.raises(DataError, match=str(tmp_path)):
        decode(tmp_path)


def test_path_bytes_and_stream_give_the_same(tmp_path):
    data = encoded(Image.fromarray(RAMP), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    found = [decode(source) for source in (tmp_path / "a.png", str(tmp_path / "a.png"), data, io.BytesIO(data))]
    for image in found:
        np.testing.assert_array_equal(np.asarray(image), RAMP)


GOOD = [encoded(Image.fromarray(RAMP), form) for form in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP")]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_bytes_give_an_rgb_image_or_a_data_error(data, changes):
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    try:
        image = decode(bytes(damaged), max_pixels=1_000_000)
    except DataError:
        return
    assert image.mode == "RGB"
    assert image.size[0] * image.size[1] <= 1_000_000


def test_list_images_is_sorted_and_knows_extensions(tmp_path):
    for name in ("b.JPG", "a.png", "10.jpeg", "9.webp", "note.txt", "._a.png", ".hidden.jpg", "noext", "Thumbs.db"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.png").write_bytes(b"x")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "sub" / "circle").symlink_to(tmp_path)
    top = ["10.jpeg", "9.webp", "a.png", "b.JPG", "gone.jpg"]
    assert list_images(tmp_path) == [tmp_path / name for name in top]
    assert image_names(tmp_path, recursive=True) == [*top, "sub/c.png"]


def test_listing_what_is_no_folder(tmp_path):
    with pytest.raises(DataError, match="none: cannot be listed"):
        list_images(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file: cannot be listed"):
        list_images(Path(tmp_path / "file"))
