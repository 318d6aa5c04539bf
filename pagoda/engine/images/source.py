"""Where an image is: a data URL, an http(s) URL, a file, or a PIL image; and its bytes.

Callers of a server send data URLs, and URLs of the domains that the operator allows. A Python program may also name
files and pass images and bytes.
"""

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import RequestError
from pagoda.engine.templates.chat_values import map_parts

IMAGE_PART = "image"
"""The type of an image's part once `take_images` has taken the image out; what chat templates look for."""
_TYPES = ("image_url", "image", "input_image", "image_pil")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a caller gives it.

    where: what errors call it.   given: a data URL, http(s) URL or path, bytes, a Path, or a PIL image.
    """

    where: str
    given: object

    @property
    def is_remote(self) -> bool:
        return isinstance(self.given, str) and self.given[:8].lower().startswith(("http://", "https://"))


def take_images(messages: Sequence[Any]) -> tuple[Sequence[Any], list[ImageSource]]:
    """Return the messages with {"type": "image"} for each image, and the images. Looks at no text and no pixel.

    Messages of an unexpected form are left as they are, for others to refuse. Raises RequestError for an image part
    that has no image.
    """
    found: list[ImageSource] = []
    changed = map_parts(messages, lambda where, part: _without_image(where, part, found))
    return (changed, found) if found else (messages, found)


def images_of_prompt(given: Any) -> list[ImageSource]:
    """Return the images of a prompt's `multi_modal_data`: {"image": one, or a list}. Raises RequestError."""
    name = "multi_modal_data"
    if not isinstance(given, Mapping) or set(given) != {"image"}:
        shown = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise RequestError(f"{name} is {abbreviate(shown)}, expected an object with image", name)
    images = given["image"]
    each = images if isinstance(images, list | tuple) else [images]
    return [ImageSource(f"{name}.image[{index}]", image) for index, image in enumerate(each)]


def has_remote_images(messages: Sequence[Any]) -> bool:
    """Return whether an image of these messages must be fetched."""
    return any(source.is_remote for source in take_images(messages)[1])


def _without_image(where: str, part: Any, found: list[ImageSource]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        return part
    found.append(ImageSource(where, _given_in(where, kind, cast("Mapping[str, Any]", part))))
    return {"type": IMAGE_PART}


def _given_in(where: str, kind: str, part: Mapping[str, Any]) -> object:
    """Return the image of a part, in the form of OpenAI (image_url, input_image), Hugging Face or Anthropic (image)."""
    names = ("image", "url", "path", "source") if kind == "image" else ("image_pil",) if kind == "image_pil" else ()
    for name in names or ("image_url",):
        value = part.get(name)
        if isinstance(value, Mapping):  # {"url": ...}; or Anthropic's source: {"type": "base64", "data": ...}
            data = value.get("data")
            value = value.get("url") if data is None else f"data:{value.get('media_type')};base64,{data}"
        if value is not None:
            return value
    raise RequestError(f"{where}: the part has no image; send it as image_url: {{'url': 'data:...'}}", where)


def read_bytes(source: ImageSource, most: int, allowed_domains: tuple[str, ...], is_trusted: bool) -> bytes:
    """Return an image's bytes, at most `most`.   allowed_domains: of the http(s) URLs that callers may name.

    is_trusted: the caller may name files of this machine.
    Raises RequestError, which names the image.
    """
    given, where = source.given, source.where
    if isinstance(given, str) and given[:5].lower() == "data:":
        return _bytes_of_data_url(given, where, most)
    if isinstance(given, str) and source.is_remote:
        from pagoda.engine.images.fetch import fetch  # its library takes a tenth of a second to import

        return fetch(given, where, allowed_domains, most)
    if is_trusted and isinstance(given, bytes):
        _check_size(len(given), most, where)
        return given
    if is_trusted and isinstance(given, str | os.PathLike):
        return _bytes_of_file(given, where, most)
    shown = abbreviate(given[:64]) if isinstance(given, str) else type(given).__name__
    raise RequestError(
        f"{where}: {shown} is not an image that this server takes: send a data URL (data:image/png;base64,...)", where
    )


def _check_size(num_bytes: int, most: int, where: str) -> None:
    if num_bytes > most:
        raise RequestError(
            f"{where}: the image has {num_bytes} bytes, more than the limit of {most} (image_bytes)", where
        )


def _bytes_of_data_url(url: str, where: str, most: int) -> bytes:
    head, comma, _ = url[:256].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(
            f"{where}: a data URL of an image has the form data:image/png;base64,... (got {shorten(head, 64)})", where
        )
    padding = url[-2:].count("=")
    _check_size((len(url) - len(head) - 1) * 3 // 4 - padding, most, where)
    try:
        return base64.b64decode(url[len(head) + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}: the data URL is not valid base64", where) from None


def _bytes_of_file(given: "str | os.PathLike[str]", where: str, most: int) -> bytes:
    name = os.fspath(given)
    if name[:5].lower() == "file:":
        name = unquote(urlsplit(name).path)
    elif _SCHEME.match(name) and not os.path.exists(name):
        raise RequestError(
            f"{where}: {shorten(name, 64)}: URLs of images begin with data:, http:, https: or file:", where
        )
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{where}: the image {shorten(str(path))} cannot be read: {why}", where) from None
    _check_size(len(data), most, where)
    return data
