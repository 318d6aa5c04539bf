"""Decode images with Pillow: bounded by their pixels before they are decoded, upright, and in RGB."""

import functools
import io
import warnings
from typing import TYPE_CHECKING

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class PixelBudget:
    """Counts the pixels of a prompt's images. Raises RequestError beyond `most` (image_pixels)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_pixels = 0

    def take(self, width: int, height: int, where: str) -> None:
        self._num_pixels += width * height
        if self._num_pixels > self._most:
            raise RequestError(
                f"{where}: with its {width} x {height} pixels, the images of this prompt have {self._num_pixels}, more "
                f"than the limit of {self._most} (image_pixels)",
                where,
            )


def decode_image(data: bytes, where: str, budget: PixelBudget) -> "Image":
    """Return the image of a PNG, JPEG, WebP or GIF file (its first frame) in RGB.

    where: what errors call it.   Raises RequestError for anything else, and beyond the budget, before decoding.
    """
    pil = _pillow(where)
    try:
        with pil.open(io.BytesIO(data), formats=FORMATS) as opened:
            budget.take(*opened.size, where)
            return _upright_rgb(opened)
    except pil.UnidentifiedImageError:
        raise RequestError(f"{where}: not a PNG, JPEG, WebP or GIF image", where) from None
    except pil.DecompressionBombError as error:
        raise RequestError(f"{where}: {shorten(str(error))}", where) from None
    except RequestError:
        raise
    except Exception as error:  # a broken file may raise anything in Pillow
        raise RequestError(f"{where}: the image cannot be decoded: {shorten(str(error))}", where) from None


def is_pil_image(given: object) -> bool:
    """Return whether `given` is a PIL image, without importing Pillow."""
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(given).__mro__)


def upright_rgb(given: object, where: str, budget: PixelBudget) -> "Image":
    """Return a caller's PIL image in RGB. Raises RequestError as `decode_image`."""
    pil = _pillow(where)
    assert isinstance(given, pil.Image)
    budget.take(*given.size, where)
    try:
        return _upright_rgb(given)
    except Exception as error:  # as above
        raise RequestError(f"{where}: the image cannot be decoded: {shorten(str(error))}", where) from None


def _upright_rgb(image: "Image") -> "Image":
    """Turn the image as its EXIF orientation says; put transparent ones on white, as transformers' processors do."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def _pillow(where: str):
    try:
        from PIL import Image
    except ImportError:
        raise RequestError(
            f"{where}: this machine cannot decode images: it lacks Pillow (pip install pillow)", where
        ) from None
    _ignore_warnings()
    return Image


@functools.cache
def _ignore_warnings() -> None:
    """Ignore Pillow's warnings: the budget refuses what they are about, or it is harmless.

    Once, for the process: `warnings.catch_warnings` changes what all threads see.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
