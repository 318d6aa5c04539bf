"""What a scheduler counts, for metrics."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start, and gauges at the moment of a snapshot.

    prefix_queries, prefix_hits: tokens looked up and found at first admissions; *_resumed: at later ones.
    encoder_queries, encoder_hits: images and audio looked up for chunks that were placed, and those whose outputs were
    cached or are made for another item of the step; a request that computes its prompt again looks them up again.
    prompt_tokens: of requests that emitted a first token.   generation_tokens: sampled tokens that counted.
    drafts: sequences and steps in which drafts were verified.   accepted_tokens_per_pos: by position in the draft; as
    many positions as the longest draft had.

    num_running, num_waiting, num_swapped: requests.   kv_usage: share of the pool that is referenced, 0 to 1.
    running_adapters, waiting_adapters: names of the LoRA adapters of these requests; swapped ones wait.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_queries_resumed: int = 0
    prefix_hits_resumed: int = 0
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

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_free_host_blocks: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

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
