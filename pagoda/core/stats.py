"""SchedulerStats: gauges and totals of one scheduler, for metrics."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_queries_resumed: int = 0
    prefix_hits_resumed: int = 0
    preemptions: int = 0
    swap_outs: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_tokens_per_pos: list[int] = field(default_factory=list[int])

    def count_lookup(self, num_tokens: int, num_cached: int, *, resumed: bool) -> None:
        """A request entered with `num_tokens` tokens, of which the prefix cache had `num_cached`."""
        if resumed:
            self.prefix_queries_resumed += num_tokens
            self.prefix_hits_resumed += num_cached
        else:
            self.prefix_queries += num_tokens
            self.prefix_hits += num_cached

    def count_draft(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of `num_drafted` tokens was verified; the first `num_accepted` were right."""
        self.drafts += 1
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_accepted
        per_pos = self.accepted_tokens_per_pos
        per_pos.extend([0] * (num_drafted - len(per_pos)))
        for position in range(num_accepted):
            per_pos[position] += 1


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges at this moment, and totals since the start.

    num_running, num_waiting, num_swapped: requests.   kv_usage: share of the pool that is referenced, 0 to 1.
    prefix_queries, prefix_hits: tokens looked up and found at first admissions; *_resumed: at later ones.
    prompt_tokens: of requests that emitted a first token.   generation_tokens: sampled tokens that counted.
    running_adapters, waiting_adapters: names of the LoRA adapters of these requests; swapped ones wait.
    drafts: sequences and steps in which drafts were verified.   accepted_tokens_per_pos: by position in the draft; as
    many positions as the longest draft had.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int
    num_free_host_blocks: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    prefix_queries_resumed: int
    prefix_hits_resumed: int
    preemptions: int
    swap_outs: int
    prompt_tokens: int
    generation_tokens: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_tokens_per_pos: tuple[int, ...]
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        counters: Counters,
        *,
        num_blocks: int,
        num_free_blocks: int,
        running_adapters: Iterable[str] = (),
        waiting_adapters: Iterable[str] = (),
        **gauges: int,
    ) -> "SchedulerStats":
        totals = {one.name: getattr(counters, one.name) for one in fields(counters)}
        totals.pop("accepted_tokens_per_pos")
        return cls(
            num_blocks=num_blocks,
            num_free_blocks=num_free_blocks,
            kv_usage=1.0 - num_free_blocks / num_blocks,
            **gauges,
            **totals,
            accepted_tokens_per_pos=tuple(counters.accepted_tokens_per_pos),
            running_adapters=tuple(sorted(running_adapters)),
            waiting_adapters=tuple(sorted(waiting_adapters)),
        )
