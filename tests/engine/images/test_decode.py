"""Files become upright RGB pixels; what is no image, or too large, is refused before it is decoded."""

import io
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from pagoda.base.errors import RequestError
from pagoda.engine.images.decode import PixelBudget, decode_image, upright_rgb
from tests.engine.images.families import image_of

ORIENTATION = 0x0112


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def decode(data, most=10**6):
    return decode_image(data, "image", PixelBudget(most))


def refused(data, most=10**6):
    with pytest.raises(RequestError) as error:
        decode(data, most)
    assert error.value.param == "image"
    return str(error.value)


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {}), ("GIF", {})])
def test_every_format_is_read(form, options):
    image = image_of(31, 17)
    data = encoded(image, form, **options)
    got = decode(data)
    assert (got.mode, got.size) == ("RGB", (31, 17))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_the_first_frame_of_an_animation_is_read(form):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    red, _, blue = np.asarray(decode(data)).reshape(-1, 3).mean(0)
    assert red > 200 > 50 > blue


def test_the_orientation_of_a_photograph_is_applied():
    image = Image.new("RGB", (20, 10))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    assert decode(encoded(image, "JPEG", exif=exif)).size == (10, 20)


@pytest.mark.parametrize(
    "entry",
    [struct.pack("<HHIf", 0x010E, 11, 1, 1.0), struct.pack("<HHIIIii", 0xA005, 10, 1, 38, 0, 1, 1)],
    ids=["text as a float", "offset as a fraction"],
)
def test_photographs_with_broken_exif_are_refused(entry):
    orientation = struct.pack("<HHII", ORIENTATION, 3, 1, 6)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + entry + bytes(4)
    data = encoded(Image.new("RGB", (20, 10)), "JPEG", exif=exif)
    assert "cannot be decoded" in refused(data)
    with pytest.raises(RequestError, match="cannot be decoded"):
        upright_rgb(Image.open(io.BytesIO(data)), "image", PixelBudget(10**6))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    data = encoded(image.convert(mode) if mode != "P" else image.quantize(), "PNG")
    assert np.asarray(decode(data)).min() == 255


@pytest.mark.parametrize("mode", ["1", "L", "CMYK"])
def test_other_modes_become_rgb(mode):
    form = "JPEG" if mode == "CMYK" else "PNG"
    assert decode(encoded(image_of(8, 8).convert(mode), form)).mode == "RGB"


def test_other_files_are_refused():
    for form in ("BMP", "TIFF", "ICO"):
        assert "not a PNG, JPEG, WebP or GIF image" in refused(encoded(image_of(8, 8), form))
    assert "not a PNG" in refused(b"")
    whole = encoded(image_of(64, 64), "PNG")
    assert "cannot be decoded" in refused(whole[: len(whole) // 2])


def test_a_bomb_is_refused_before_it_is_decoded():
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )
    assert "60000 x 60000" in refused(bomb) or "exceeds limit" in refused(bomb)
    assert "(image_pixels)" in refused(encoded(image_of(101, 100), "PNG"), 10_000)


def test_the_pixels_of_all_images_of_a_prompt_count():
    budget = PixelBudget(200)
    decode_image(encoded(image_of(10, 10), "PNG"), "first", budget)
    upright_rgb(image_of(10, 10), "second", budget)
    with pytest.raises(RequestError, match="third: with its 1 x 1 pixels, the images of this prompt have 201"):
        upright_rgb(image_of(1, 1), "third", budget)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    data = encoded(image_of(8, 8), "PNG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in refused(data)


def test_decoding_leaves_the_processes_warnings_as_they_are(monkeypatch):
    """Several threads decode at once; `catch_warnings` on one would change what the others see."""
    data = encoded(image_of(4, 4), "PNG")
    decode(data)
    before, during = list(warnings.filters), []
    opened = Image.open
    monkeypatch.setattr(
        Image, "open", lambda *args, **more: during.append(list(warnings.filters)) or opened(*args, **more)
    )
    decode(data)
    assert during == [before]
    assert warnings.filters == before
