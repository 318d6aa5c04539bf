"""Request: one prompt and its parameters, immutable."""

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Status of a request or of one of its sequences. Everything from FINISHED_STOPPED on is final."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2  # KV parked in host memory
    PREEMPTED = 3  # KV dropped; back in waiting
    FINISHED_STOPPED = 4  # eos, stop token or stop string
    FINISHED_LENGTH_CAPPED = 5  # max_tokens or max_model_len
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7  # can never be served
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """Return the finish reason for clients: stop, length, abort or error; None while unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


PLACEHOLDER_ID = 0
"""The token id of prompt positions that are given as embeddings. No output depends on it."""


@dataclass(frozen=True, slots=True)
class LoraRef:
    """One adapter.

    path: its folder.   digest: of its contents.
    """

    name: str
    path: str = ""
    digest: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """Return what makes it the same adapter: its contents alone, or name and path where the digest is unknown.

        Equal contents share blocks and slots, whatever their names; a name whose files have changed does not.
        """
        return (self.digest,) if self.digest else (self.name, self.path)


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """An encoder input (image, audio) that takes the place of `length` prompt tokens from `offset` on.

    For an encoder-decoder model it takes no place in the prompt: `offset` is 0, and `length` is its encoder tokens.
    content_hash identifies the content: equal hashes share one encoder output.
    features: what the encoder reads, float32 in the shape that it asks for; None where nothing runs it, and of the
        items of a worker's rows.
    grid: sizes that the encoder needs to lay the features out (rows and columns of patches, for example).
    """

    content_hash: str
    offset: int
    length: int
    features: np.ndarray | None = None
    grid: tuple[int, ...] = ()


def without_features(item: MediaItem) -> MediaItem:
    """Return the item as rows know it."""
    return item if item.features is None else replace(item, features=None)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its parameters; yields `sampling.n` output sequences.

    prompt_token_ids: int32 [num_prompt_tokens], not empty.
    sampling / pooling: exactly one is set.
    seed: the random stream's key, always set by the client (drawn if the user gave none), so that a request can be
        replayed anywhere. Sequence i samples with seed + i.
    handle: a number the client chose, unique among its unfinished requests; outputs carry it instead of the id.
    prior_output: tokens each sequence has emitted already (of a request resumed after the engine died); they count
        as output, are not emitted again, and sampling continues after them. Empty, or one tuple per sequence.
    arrival_time_s: on the engine's clock.   priority: smaller is sooner.
    encoder_len: encoder tokens of an encoder-decoder request (sizes its cross-attention table), else 0.
    prompt_embeds: float32 [n, hidden], what the first n prompt positions have in place of their tokens' embeddings;
        their token ids are PLACEHOLDER_ID.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: SamplingParams | None = None
    pooling: PoolingParams | None = None
    arrival_time_s: float = 0.0
    priority: int = 0
    client_index: int = 0
    handle: int = 0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    lora: LoraRef | None = None
    cache_salt: str | None = None
    skip_prefix_read: bool = False
    media: tuple[MediaItem, ...] = ()
    encoder_len: int = 0
    prior_output: tuple[tuple[int, ...], ...] = ()
    prompt_embeds: np.ndarray | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_embeds(self) -> int:
        """How many of the first prompt positions are given as embeddings."""
        return 0 if self.prompt_embeds is None else len(self.prompt_embeds)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its tokens may be found in the prefix cache. Logprobs of the prompt need all of it computed."""
        return not self.skip_prefix_read and (self.sampling is None or self.sampling.prompt_logprobs is None)

    @property
    def num_seqs(self) -> int:
        return self.sampling.n if self.sampling is not None else 1

    @property
    def grammar(self) -> str | None:
        """The grammar that its output follows, as text."""
        return self.sampling.grammar if self.sampling is not None else None

    @property
    def is_beam_search(self) -> bool:
        return self.sampling is not None and self.sampling.beam_search is not None
