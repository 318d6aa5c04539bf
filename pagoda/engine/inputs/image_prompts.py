"""ImagePrompts: put images into the prompts of one model, as its family writes them."""

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.core.request import MediaItem
from pagoda.engine.images.decode import PixelBudget, decode_image, is_pil_image, upright_rgb
from pagoda.engine.images.process import ImageFeatures, num_image_tokens, process_image
from pagoda.engine.images.source import ImageSource, read_bytes
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.models.image_config import ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image

_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class ImagePrompts:
    """Reads images, and replaces their places in a rendered prompt by their tokens. Thread-safe; keeps nothing."""

    def __init__(
        self,
        config: ImageConfig,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        allowed_domains: tuple[str, ...] = (),
    ) -> None:
        """allowed_domains: of the URLs that callers may name. Raises ConfigError if the tokenizer lacks a token."""
        self.config = config
        self._marks = tokenizer.facts.marks
        self._limits = limits
        self._allowed_domains = allowed_domains
        for token in (config.placeholder, *config.tokens):
            if token not in self._marks.texts:
                raise ConfigError(f"the tokenizer has no special token {token!r}, which this model needs for images")
        self._token_ids = [tokenizer.encode(token, add_special_tokens=False)[0] for token in config.tokens]
        self.image_token_id = self._token_ids[0]

    def check_count(self, sources: Sequence[ImageSource]) -> None:
        """Raise RequestError for more images than a prompt may have."""
        self._limits.check("images", len(sources), "messages")

    def put(
        self, text: str, sources: Sequence[ImageSource], max_tokens: int, *, is_marked: bool, is_trusted: bool
    ) -> tuple[str, list[ImageFeatures]]:
        """Return a rendered prompt with each image's tokens in its place, and what the tower reads, in their order.

        max_tokens: the most image tokens; no image is read beyond them.
        is_marked: the text has marks in place of the template's special tokens.   is_trusted: see `read_bytes`.
        Raises RequestError, which names the image, for one that cannot be read.
        """
        placeholder = self._marks.put(self.config.placeholder) if is_marked else self.config.placeholder
        around = text.split(placeholder)
        if len(around) != len(sources) + 1:
            raise RequestError(
                f"messages: the rendered prompt has {len(around) - 1} places for {len(sources)} images: the chat "
                "template leaves some out, or a message has an image token as text",
                "messages",
            )
        budget = PixelBudget(self._limits.image_pixels)
        parts, features, num_tokens = [around[0]], list[ImageFeatures](), 0
        for source, after in zip(sources, around[1:], strict=True):
            image = self._read(source, budget, is_trusted)
            num_tokens += num_image_tokens(*image.size, self.config)
            if num_tokens > max_tokens:  # before there are features, which take memory by their tokens
                # Clients recognise OpenAI's words for it.
                raise RequestError(
                    f"{source.where}: This model's maximum context length is {max_tokens} tokens. However, the images "
                    f"up to this one have {num_tokens}. Please send fewer, or smaller ones.",
                    source.where,
                )
            processed = process_image(image, self.config, source.where)
            written = processed.text
            if is_marked:
                written = self._marks.put_only(written, set(_TOKEN.findall(written)).intersection(self._marks.texts))
            parts += written, after
            features += processed.items
        return "".join(parts), features

    def _read(self, source: ImageSource, budget: PixelBudget, is_trusted: bool) -> "Image":
        if is_trusted and is_pil_image(source.given):
            return upright_rgb(source.given, source.where, budget)
        data = read_bytes(source, self._limits.image_bytes, self._allowed_domains, is_trusted)
        return decode_image(data, source.where, budget)

    def media_of(self, token_ids: Sequence[int], features: Sequence[ImageFeatures]) -> tuple[MediaItem, ...]:
        """Return the MediaItems of a prompt: each stands for the next `length` image tokens, which are adjacent.

        Raises RequestError if the prompt has other image tokens than those of its images.
        """
        places = np.flatnonzero(np.isin(token_ids, self._token_ids))
        lengths = np.array([item.length for item in features])
        ends = np.cumsum(lengths)
        if len(places) != ends[-1] or (places[ends - 1] - places[ends - lengths] != lengths - 1).any():
            raise RequestError("messages: a message has an image token as text; remove it", "messages")
        return tuple(
            MediaItem(_content_hash(item), int(places[end - item.length]), item.length, item.features, item.grid)
            for item, end in zip(features, ends.tolist(), strict=True)
        )


def _content_hash(item: ImageFeatures) -> str:
    """Return a hash of everything that an encoder's output for the item depends on."""
    shape = repr((item.features.shape, item.grid, item.length)).encode()
    return hashlib.sha256(shape + hashlib.sha256(item.features.data).digest()).hexdigest()


def of_salt(media: Sequence[MediaItem], cache_salt: str | None) -> tuple[MediaItem, ...]:
    """Return the items with hashes that are shared with requests of the same salt only, as cached prefixes are."""
    if cache_salt is None:
        return tuple(media)

    def salted(content_hash: str) -> str:
        return hashlib.sha256(f"{len(cache_salt)}:{cache_salt}{content_hash}".encode()).hexdigest()

    return tuple(
        MediaItem(salted(item.content_hash), item.offset, item.length, item.features, item.grid) for item in media
    )
