"""Request: the cold facts of one prompt. Everything that changes while it runs is in RequestTable."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pagoda.base.sampling_params import PoolingParams, SamplingParams


class RequestStatus(IntEnum):
    """Where a request stands. Everything from FINISHED_STOPPED on is final."""

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
        """The word that clients know: stop, length, abort, error; None while alive."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class LoraRef:
    """One adapter: block hashes use name and path, since a name may be pointed elsewhere."""

    name: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An encoder input (image, audio) that stands for `length` placeholder tokens from `offset` of the prompt.

    content_hash identifies the content: equal hashes share one encoder output.
    """

    content_hash: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its parameters; yields `sampling.n` output sequences.

    prompt_token_ids: int32 [num_prompt_tokens], not empty.
    sampling / pooling: exactly one is set.
    seed: the random stream's key, always set by the client (drawn where the user gave none), so that a request can be
        replayed anywhere. Branch i samples with seed + i.
    handle: a number the client chose; outputs carry it instead of the id. Unique among the client's live requests.
    prior_output: tokens each branch has emitted already (a request resumed after an engine's death); they count
        as output, are not emitted again, and sampling goes on at their end. Empty, or one tuple per branch.
    arrival_time_s: on the engine's clock.   priority: smaller is sooner.
    encoder_len: encoder tokens of an encoder-decoder request (sizes its cross-attention table), else 0.
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

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_branches(self) -> int:
        return self.sampling.n if self.sampling is not None else 1
