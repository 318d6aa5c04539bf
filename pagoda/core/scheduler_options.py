"""SchedulerOptions: all options of a scheduler."""

from dataclasses import dataclass

from pagoda.base.config import PreemptionMode, SchedulingMode, SchedulingPolicy
from pagoda.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What runs in a step. `pagoda.assembly.engine_setup` makes these from the settings; 0 switches a limit off.

    prefix_hash_seed: seed of the prefix-cache hashes; None draws a secret one.
    pipeline_depth: steps scheduled before the first result is back.   async_scheduling: tokens in flight count as
    known.
    num_stages: workers that compute a step one after the other: a step decodes a share of the rows, so that as many
    steps can be in flight.
    has_followers: some workers do not sample: steps carry the tokens that earlier ones decided.
    max_loras: distinct adapters over the running requests.
    encoder_budget, encoder_cache_tokens: encoder tokens computed per step, and cached.
    no_partial_media: a media item is never split over chunks.
    max_encoder_len: most encoder tokens of a request of an encoder-decoder model, for which the cache must have room.
    check_invariants: check everything after each step.   decision_log_steps: steps whose decisions are kept.
    The other fields are settings of the same names (`SchedulerConfig`, `PrefillConfig`).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling_mode: SchedulingMode = SchedulingMode.MIXED
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    enable_chunked_prefill: bool = True
    admit_whole_prompt: bool = True
    max_num_partial_prefills: int = 0
    long_prefill_token_threshold: int = 0
    prefill_beside_decodes: int = 0
    scheduler_delay_factor: float = 0.0
    async_scheduling: bool = False
    evict_for_priority: bool = False
    prefix_hash_seed: int | None = None
    pipeline_depth: int = 1
    num_stages: int = 1
    has_followers: bool = False
    max_loras: int = 0
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    no_partial_media: bool = False
    max_encoder_len: int = 0
    check_invariants: bool = False
    decision_log_steps: int = 0

    @property
    def max_rows(self) -> int:
        """Return the rows of the table: each step in flight may pin max_num_seqs of them until it is complete."""
        return self.max_num_seqs * max(self.pipeline_depth, 1)

    def check(self, max_model_len: int) -> None:
        """Raise ConfigError for options that contradict each other; it says what to change."""
        budget = self.max_num_batched_tokens
        if budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={self.max_num_seqs}: "
                "not every running sequence could get a token in each step; raise the first or lower the second"
            )
        mixed = self.scheduling_mode is SchedulingMode.MIXED
        if mixed and not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt must fit one step: max_num_batched_tokens={budget} is less than "
                f"max_model_len={max_model_len}; raise the first, lower the second, or leave chunked prefill on"
            )
        if self.prefill_beside_decodes and (not self.enable_chunked_prefill or self.no_partial_media):
            raise ConfigError(
                f"prefill_beside_decodes={self.prefill_beside_decodes} cuts prompts anywhere: leave "
                "enable_chunked_prefill on and no_partial_media off, or prompts that must not be cut wait until "
                "nothing decodes"
            )
