"""SchedulerStats: what a scheduler counts for metrics, folded from its events."""

from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pagoda.core.events import Admitted, DraftsVerified, Encoded, Event, FirstToken, Loaded, Preempted, Swapped
from pagoda.core.request import AdmitKind

_T = TypeVar("_T")
GAUGE = "gauge"
Gauge = Annotated[_T, GAUGE]
"""The type of a field that is no total: it says what is so at the moment of a snapshot."""


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start, and gauges at the moment of a snapshot.

    prefix_queries, prefix_hits: tokens looked up and found at first admissions; *_resumed: at later ones.
    tier_queries, tier_hits: tokens that a tier had and was asked for, and those that it loaded.
    encoder_queries, encoder_hits: images and audio looked up for chunks that were placed, and those whose outputs were
    cached or are made for another item of the step; a request that computes its prompt again looks them up again.
    prompt_tokens: of requests that emitted a first token.   generation_tokens: sampled tokens that counted: no event
    tells them, the commit side adds them up.
    drafts: sequences and steps in which drafts were verified.   accepted_tokens_per_pos: by position in the draft; as
    many positions as the longest draft had.
    num_tier_stored, num_tier_lost: blocks that a tier was given, and that it has no more.

    num_running, num_waiting, num_swapped: requests.   num_deferred: of those that wait, how many do so for something of
    their own: a grammar, an adapter, a token in flight, or room for one more adapter in the batch.
    num_states, num_free_states: blocks of recurrent states, which have a pool of their own next to attention's; else 0.
    kv_usage: share of the pool that is referenced, 0 to 1; of two pools, the larger share.
    running_adapters, waiting_adapters: names of the LoRA adapters of these requests; swapped ones wait.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    tier_queries: int = 0
    tier_hits: int = 0
    encoder_queries: int = 0
    encoder_hits: int = 0
    preemptions: int = 0
    swap_outs: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_tokens_per_pos: list[int] = field(default_factory=list[int])
    num_tier_stored: int = 0
    num_tier_lost: int = 0

    num_running: Gauge[int] = 0
    num_waiting: Gauge[int] = 0
    num_deferred: Gauge[int] = 0
    num_swapped: Gauge[int] = 0
    num_blocks: Gauge[int] = 0
    num_free_blocks: Gauge[int] = 0
    num_states: Gauge[int] = 0
    num_free_states: Gauge[int] = 0
    num_free_host_blocks: Gauge[int] = 0
    running_adapters: Gauge[tuple[str, ...]] = ()
    waiting_adapters: Gauge[tuple[str, ...]] = ()

    @property
    def kv_usage(self) -> float:
        pools = (self.num_blocks, self.num_free_blocks), (self.num_states, self.num_free_states)
        return max([1.0 - num_free / count for count, num_free in pools if count], default=0.0)

    def count(self, event: Event) -> None:
        """Add an event to the totals."""
        if type(event) not in _COUNTED:
            return
        match event:
            case Admitted(num_cached=int(num_cached)) if event.kind is AdmitKind.NEW:
                self.prefix_queries += event.num_tokens
                self.prefix_hits += num_cached
            case Loaded():
                self.tier_queries += event.num_tokens
                self.tier_hits += event.num_loaded
            case FirstToken():
                self.prompt_tokens += event.num_prompt_tokens
            case Preempted():
                self.preemptions += 1
            case Swapped(to_host=True):
                self.swap_outs += 1
            case Encoded():
                self.encoder_queries += event.num_items
                self.encoder_hits += event.num_cached
            case DraftsVerified():
                self._count_drafts(event)
            case _:
                pass

    def _count_drafts(self, event: DraftsVerified) -> None:
        self.drafts += len(event.handles)
        self.drafted_tokens += sum(event.num_drafted)
        self.accepted_tokens += sum(event.num_accepted)
        per_pos = self.accepted_tokens_per_pos
        per_pos.extend([0] * (max(event.num_drafted) - len(per_pos)))
        for num_accepted in event.num_accepted:
            for position in range(num_accepted):
                per_pos[position] += 1


_COUNTED = frozenset((Admitted, FirstToken, Loaded, Preempted, Swapped, Encoded, DraftsVerified))  # most events are not
