"""Events: what happens in the core. The owner of a fact writes it once; whoever wants to know folds over the stream.

No event says that a row decoded one more token. `step` is the number of the step that is planned, or whose result is
applied, when the event is written; between steps, the last such step. `time_s` is on the engine's clock. A request is
identified by its client and handle; its id is a label, which the first and the last event of it carry.
"""

from dataclasses import dataclass
from enum import Enum

from pagoda.core.request import AdmitKind, RequestStatus


class Reason(Enum):
    """Why a waiting request did not enter in a step, or a running row computes less than it could."""

    BUDGET = "token budget spent"
    NUM_SEQS = "max_num_seqs sequences are running"
    BLOCKS = "not enough free blocks"
    WATERMARK = "too few free blocks above the watermark"
    NEVER = "can never be served"
    LORA = "max_loras adapters are in the batch"
    ENCODER = "encoder budget or cache spent"
    GRAMMAR = "grammar not compiled yet"
    ADAPTER = "adapter not loaded yet"
    DELAY = "waiting for more prompts to gather"
    PARTIAL_PREFILLS = "too many prompts are mid-prefill"
    IN_FLIGHT = "one of its tokens is still in flight"
    ROW_CAP = "long_prefill_token_threshold"
    STAGES = "each pipeline stage decodes a share of the rows"
    PREFILL_SHARE = "prefill_beside_decodes"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something happened to one request."""

    step: int
    time_s: float
    client: int
    handle: int


@dataclass(frozen=True, slots=True)
class Queued(RequestEvent):
    """It was added.   position: requests before it in the queue."""

    request_id: str
    num_prompt_tokens: int
    num_seqs: int
    position: int


@dataclass(frozen=True, slots=True)
class Held(RequestEvent):
    """It was considered and did not enter. Written when the reason is another one than before.

    position: requests before it in its queue.   stops_queue: requests after it were not considered.
    num_blocks: blocks that its tokens take, those in the prefix cache included.   num_free_blocks: that were free.
    """

    reason: Reason
    position: int
    stops_queue: bool
    num_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class Admitted(RequestEvent):
    """It runs. Counts are of its sequences that got a row.

    num_tokens: known.   num_cached: of those, found in the prefix cache.   num_computed: have their KV, from the prefix
    cache or from host memory.   num_new: computed in this step.
    num_blocks: that its first sequence holds now.   num_free_blocks: after that.
    """

    kind: AdmitKind
    num_tokens: int
    num_cached: int
    num_computed: int
    num_new: int
    num_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class Limited(RequestEvent):
    """A running sequence computes less in this step than it could.

    Written when the reason is another one than the last since its row was given to it.
    """

    sequence: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Preempted(RequestEvent):
    """It left the running batch so that another request can continue or enter.

    for_client, for_handle: that request (itself, if it was its own victim); None after a failed step or a reset of the
    prefix cache.   mode: "recompute" or "swap".
    lost_tokens: must be computed again.   freed_blocks: what that freed.
    """

    for_client: int | None
    for_handle: int | None
    mode: str
    lost_tokens: int
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class Swapped(RequestEvent):
    """Its KV is copied in this step.   to_host: to host memory, else back.   num_blocks: distinct blocks."""

    to_host: bool
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Encoded(RequestEvent):
    """A chunk with media items was placed.

    num_items: items looked up for it.   num_cached: of those, outputs that were there or are made for another item.
    """

    num_items: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class FirstToken(RequestEvent):
    """Its first token or, of a request to pool, its vector is there."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DraftsVerified:
    """Drafts of one client's sequences were verified in a step; one entry per sequence in each of the four."""

    step: int
    time_s: float
    client: int
    handles: tuple[int, ...]
    sequences: tuple[int, ...]
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copied(RequestEvent):
    """Copy-on-write: block `source` was shared when the sequence had to write to it; it has `target` now."""

    sequence: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Failed(RequestEvent):
    """A row of one of its sequences failed, or read what a failed row should have written.

    failed_step: the step in which the row failed.   message: why; None if the request is computed again.
    """

    failed_step: int
    message: str | None


@dataclass(frozen=True, slots=True)
class Ended(RequestEvent):
    """One of its sequences ended.

    stop_reason: the stop token id that ended it, None for eos.   message: for users, of IGNORED and ERROR, and of
    a LENGTH_CAPPED sequence that the KV cache could not hold; what that has emitted is its result.
    is_last: the request has ended, too.
    """

    request_id: str
    sequence: int
    status: RequestStatus
    stop_reason: int | None = None
    message: str | None = None
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of KV group `group` can be found by these hashes from now on; each is the prefix of the next.

    parent: the hash before the first, None for a first block.   tier: the memory that has them.
    """

    step: int
    time_s: float
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class Removed:
    """No block of KV group `group` is found by these hashes any more."""

    step: int
    time_s: float
    group: int
    hashes: tuple[bytes, ...]
    tier: str = "device"


CacheEvent = Stored | Removed
ClientEvent = (
    Queued
    | Held
    | Admitted
    | Limited
    | Preempted
    | Swapped
    | Encoded
    | FirstToken
    | DraftsVerified
    | Copied
    | Failed
    | Ended
)
"""What is sent to the client whose request it is about."""
Event = ClientEvent | CacheEvent
