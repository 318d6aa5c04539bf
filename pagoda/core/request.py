"""Request: one prompt and its parameters, immutable. RequestState and Sequence: what changes while it is served."""

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

import numpy as np

from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Status of a request or of one of its sequences. Everything from FINISHED_STOPPED on is final."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2  # its KV is in host memory
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


class AdmitKind(IntEnum):
    """How a request enters the running batch."""

    NEW = 0
    RESUMED = 1  # was preempted by recompute
    SWAPPED_IN = 2  # its KV comes back by `swap_in` of the same step


class Reason(Enum):
    """Why a waiting request did not enter in a step, or a running row computes less than it could."""

    TURN = "its turn"
    BUDGET = "token budget spent"
    NUM_SEQS = "as many sequences run as max_num_seqs allows"
    BLOCKS = "not enough free blocks"
    WATERMARK = "too few free blocks above the watermark"
    NEVER = "can never be served"
    LORA = "as many adapters are in the batch as max_loras allows"
    ENCODER = "encoder budget or cache spent"
    GRAMMAR = "grammar not compiled yet"
    ADAPTER = "adapter not in memory (max_cpu_loras)"
    TRANSFER = "its cached blocks are being loaded (kv_tier)"
    DELAY = "waiting for more prompts to gather"
    PARTIAL_PREFILLS = "as many prompts are mid-prefill as max_num_partial_prefills allows"
    IN_FLIGHT = "one of its tokens is still in flight"
    ROW_CAP = "long_prefill_token_threshold"
    STAGES = "each pipeline stage decodes a share of the rows"
    PREFILL_SHARE = "prefill_beside_decodes"


PLACEHOLDER_ID = 0
"""The token id of prompt positions that are given as embeddings. No output depends on it."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """What positions of a prompt have in place of their tokens' embeddings; their token ids are PLACEHOLDER_ID.

    positions: int32 [n], ascending.   values: float32 [n, hidden].
    """

    positions: np.ndarray
    values: np.ndarray

    @staticmethod
    def of_first(values: np.ndarray) -> "PromptEmbeds":
        """Return embeddings of a prompt's first positions."""
        return PromptEmbeds(np.arange(len(values), dtype=np.int32), values)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def end(self) -> int:
        """The position after the last one."""
        return int(self.positions[-1]) + 1

    def within(self, start: int, end: int) -> "PromptEmbeds":
        """Return those of the positions `start` .. `end` - 1, counted from `start`."""
        first, last = np.searchsorted(self.positions, (start, end))
        return PromptEmbeds(self.positions[first:last] - np.int32(start), self.values[first:last])

    def after(self, before: np.ndarray) -> "PromptEmbeds":
        """Return these behind embeddings of new first positions."""
        moved = self.positions + np.int32(len(before))
        first = np.arange(len(before), dtype=np.int32)
        return PromptEmbeds(np.concatenate([first, moved]), np.concatenate([before, self.values]))


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

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.length

    def overlaps(self, start: int, end: int) -> bool:
        """Whether one of its tokens is at the positions `start` .. `end` - 1."""
        return self.offset < end and start < self.end


def without_features(item: MediaItem) -> MediaItem:
    """Return the item as rows know it."""
    return item if item.features is None else replace(item, features=None)


@dataclass(frozen=True, slots=True)
class Pin:
    """Other blocks lose their content before those of this request do, for `ttl_s` seconds after it left them.

    A later request that uses them renews that only if it has a pin, too.
    owner: of whose share of the pool that takes.
    """

    ttl_s: int
    owner: str = ""


RequestKey = tuple[int, int]
"""What identifies an unfinished request: its client's index and the handle that this client chose."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and its parameters; yields `sampling.n` output sequences.

    prompt_token_ids: int32 [num_prompt_tokens], not empty.
    sampling / pooling: exactly one is set.
    seed: the random stream's key, always set by the client (drawn if the user gave none), so that a request can be
        replayed anywhere. Sequence i samples with seed + i.
    request_id: a label for people.
    handle: a number the client chose, unique among its unfinished requests; outputs carry it instead of the id.
    prior_output: tokens each sequence has emitted already (of a request resumed after the engine died); they count
        as output, are not emitted again, and sampling continues after them. Empty, or one tuple per sequence.
    arrival_time_s: on the engine's clock.   priority: smaller is sooner.
    cache_salt: cached prefixes are shared where it agrees. What it has before a colon names who may only have so much
        of a tier.
    encoder_len: encoder tokens of an encoder-decoder request (sizes its cross-attention table), else 0.
    prompt_embeds: of some positions, not empty; None: all have tokens.
    pin: keep its blocks in the prefix cache rather than others.
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
    prompt_embeds: PromptEmbeds | None = None
    pin: Pin | None = None

    @property
    def key(self) -> RequestKey:
        return (self.client_index, self.handle)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_embeds(self) -> int:
        """How many prompt positions are given as embeddings."""
        return 0 if self.prompt_embeds is None else len(self.prompt_embeds)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its tokens may be found in the prefix cache. Logprobs of the prompt need all of it computed."""
        return not self.skip_prefix_read and (self.sampling is None or self.sampling.prompt_logprobs is None)

    @property
    def wants_output(self) -> bool:
        """Whether its client gets tokens: not if it is pooled, or only scored (max_tokens 0).

        Where a prompt is scored, one token is sampled and dropped.
        """
        return self.sampling is not None and self.sampling.max_tokens != 0

    @property
    def num_seqs(self) -> int:
        return self.sampling.n if self.sampling is not None else 1

    @property
    def grammar(self) -> str | None:
        """The grammar of its output's rule (`OutputRule`), as text; None without a rule."""
        rule = self.sampling.rule if self.sampling is not None else None
        return None if rule is None else rule.grammar

    @property
    def is_beam_search(self) -> bool:
        return self.sampling is not None and self.sampling.beam_search is not None


def num_beam_candidates(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> int:
    """Return how many of each beam's most likely tokens a step must return.

    One beam may have to provide all of the next beams, and as many tokens that end it.
    """
    num_ends = 0 if params.ignore_eos else len(set(eos_token_ids))
    return params.n + num_ends + len(params.stop_token_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One output sequence of a request.

    row: its row in RequestTable, -1 while it has none.
    token_ids, num_computed: current while row is -1; otherwise the table's columns are. RequestTable writes all three.
    end: how it ended; None while it has not. Where it is until then is its request's status. Written by lifecycle.py.
    """

    request: "RequestState"
    index: int
    token_ids: np.ndarray
    row: int = -1
    num_computed: int = 0
    end: RequestStatus | None = None

    @property
    def is_finished(self) -> bool:
        return self.end is not None

    @property
    def seed(self) -> int:
        return self.request.spec.seed + self.index


SortKey = tuple[float | int | str, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request had come to when a scheduler started over.   was_admitted: it has run.

    has_output: its first token was there.   ended: how its sequences have ended, by index.
    """

    was_admitted: bool = False
    has_output: bool = False
    ended: dict[int, RequestStatus] = field(default_factory=dict[int, RequestStatus])


NEW = Progress()


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that was added and has not ended.

    spec: what was asked for.
    sort_key: its place in the queues, set by the policy.   admission: number of its last admission, which orders the
        running batch; -1 before the first.
    unfinished: those of its sequences that have not ended; lifecycle.py replaces the list when one ends.
    awaiting_fork: its sequences share the first one's row until the prompt is computed.
    held_for: why it waits, as was last written: why it did not enter when it was considered, or Reason.TURN if that is
        over; None if it was not considered yet, or runs.
    has_output: its first token is there.
    num_prompt_logprobs_sent: prompt positions whose logprobs were sent; a resumed request computes them again.
    num_adapter_skips: steps since it last ran in which requests after it could enter, because its adapter had no room.
    """

    spec: Request
    sort_key: SortKey
    status: RequestStatus = RequestStatus.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: list[Sequence] = field(default_factory=list)
    awaiting_fork: bool = True
    admission: int = -1
    held_for: Reason | None = None
    has_output: bool = False
    num_prompt_logprobs_sent: int = 0
    num_adapter_skips: int = 0
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.spec.key

    @property
    def progress(self) -> Progress:
        ended = {one.index: one.end for one in self.sequences if one.end is not None}
        return Progress(self.admission >= 0, self.has_output, ended)

    @property
    def siblings(self) -> list[Sequence]:
        """Sequences that will share the first one's prompt blocks when they return with it; none before the fork."""
        return [] if self.awaiting_fork else self.unfinished[1:]

    @property
    def rows(self) -> list[int]:
        """Rows of its sequences that have one."""
        return [sequence.row for sequence in self.sequences if sequence.row >= 0]
