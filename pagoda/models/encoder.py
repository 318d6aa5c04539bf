"""Encoder: what turns an encoder input (audio, an image) into rows that a decoder reads, and how items are laid out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.core.request import MediaItem, Request
from pagoda.models.base import Model
from pagoda.ops.declare import Domain

FEATURES = "features"
"""Input of an encoder's batch: what it reads, in the compute type."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemArray:
    """One input of an item: floats, in the compute type once they are in a batch, or integers.

    values: [rows] or [rows, n].   domain: what the rows are.
    indexes: of integers that are numbers of rows of this domain in the item, -1 for none; those of further items of a
        batch are moved up. None: of other integers.
    """

    values: np.ndarray
    domain: Domain = Domain.TOKENS
    indexes: Domain | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncoderItem:
    """One item as the encoder computes it.

    segments: how many consecutive tokens attend to each other, int32 [segments], for each kind of attention there is;
        the first is `batch.metadata[0]`. They add up to the item's tokens.
    num_outputs: rows that the encoder returns.
    inputs: by name.   positions: int32 [tokens], or [tokens, runs] (see ForwardOps.rotary); None: they count up.
    """

    segments: tuple[np.ndarray, ...]
    num_outputs: int
    inputs: Mapping[str, ItemArray] = field(default_factory=dict[str, ItemArray])
    positions: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.segments[0].sum())

    def num_rows(self, domain: Domain) -> int:
        """Return how many rows of a domain the item has."""
        if domain is Domain.TOKENS:
            return self.num_tokens
        if domain is Domain.TAIL:
            return self.num_outputs
        return next(len(array.values) for array in self.inputs.values() if array.domain is domain)


class Encoder(Model):
    """A model of tokens that attend both ways, of which a decoder's tree has one (`Model.media_encoder`).

    `forward` computes a batch of items. Its batch has the inputs of its items, positions, and a metadata for each kind
    of attention; no token ids. It returns the items' outputs, one after the other: a row per token, or per row of the
    batch's tail where it makes fewer.
    output_size: elements of each of its outputs.   reads_text: its features are token ids, [tokens, 1]; `start` is what
    the decoder's answer to a text begins with.
    whole_items: all rows of an item must be in one chunk of the decoder, because they attend to each other there.
    """

    output_size: int
    reads_text: bool = False
    start: tuple[int, ...] = ()
    kv_groups = ()
    is_causal = False
    generates = False
    whole_items: bool = False
    takes_adapters = False

    def largest_item(self) -> MediaItem:
        """Return the largest item there can be, with features of zeros."""
        raise NotImplementedError

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        """Return how many rows an item becomes.   shape: of its features.

        Raises RequestError for features that the encoder does not take.
        """
        raise NotImplementedError

    def check_values(self, features: np.ndarray) -> None:
        """Raise RequestError for features, of a shape that `num_outputs` accepts, whose values cannot be read."""

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        """Return what the encoder computes of an item that `num_outputs` accepts."""
        raise NotImplementedError


def check_media(request: Request, encoder: Encoder | None, crosses: bool) -> None:
    """Raise RequestError for encoder inputs that the model cannot read, and for a request that lacks its own.

    encoder: None for a model that reads none.   crosses: it is of an encoder-decoder model.
    """
    media, num_tokens = request.media, request.num_prompt_tokens
    if encoder is None and media:
        raise RequestError("this model reads neither images nor audio: send text", "media")
    if encoder is None:
        return
    if crosses and not media:
        raise RequestError("this model needs an encoder input besides its prompt (audio, for Whisper)", "media")
    if crosses and len(media) > 1:
        raise RequestError(f"this model reads one encoder input per request, not {len(media)}", "media")
    end = 0
    for item in media:
        features = item.features
        if features is None or features.dtype != np.float32 or not np.isfinite(features).all():
            raise RequestError("a media item needs features of finite numbers, in float32", "media")
        length = encoder.num_outputs(features.shape, item.grid)
        encoder.check_values(features)
        if item.length != length:
            raise RequestError(f"a media item has {item.length} tokens, but its features give {length}", "media")
        if not crosses and (item.offset < end or item.offset + length > num_tokens):
            raise RequestError(
                f"a media item of {length} tokens at {item.offset} is outside of the prompt of {num_tokens} tokens, or "
                "within another",
                "media",
            )
        end = item.offset + length
    if request.encoder_len != (sum(item.length for item in media) if crosses else 0):
        raise RequestError(f"encoder_len={request.encoder_len} is not what the encoder inputs have", "media")
