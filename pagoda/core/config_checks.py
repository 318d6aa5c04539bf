"""check_config: settings that a scheduler cannot work with."""

from pagoda.base.config import SchedulerConfig, SchedulingMode
from pagoda.base.errors import ConfigError
from pagoda.core.kv_specs import KVGroupKind, KVGroupSpec


def check_config(
    config: SchedulerConfig, kv_groups: tuple[KVGroupSpec, ...], num_blocks: int, max_model_len: int
) -> None:
    """Raises ConfigError that names the setting, its value and the remedy."""
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is below max_num_seqs={config.max_num_seqs}: "
            "a decode step could not hold every sequence"
        )
    mixed = config.scheduling_mode is SchedulingMode.MIXED
    if mixed and not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill max_num_batched_tokens={config.max_num_batched_tokens} must be at least "
            f"max_model_len={max_model_len}"
        )
    if config.prefill_beside_decodes and (not config.enable_chunked_prefill or config.no_partial_media):
        raise ConfigError(
            f"prefill_beside_decodes={config.prefill_beside_decodes} cuts prompts anywhere: leave "
            "enable_chunked_prefill on and no_partial_media off, or prompts that must not be cut wait until nothing "
            "decodes"
        )
    if num_blocks < 1:
        raise ConfigError("the KV cache has no blocks; raise kv_cache_memory or num_blocks")
    if not any(group.kind is not KVGroupKind.CROSS for group in kv_groups):
        raise ConfigError("a model needs at least one full or window KV group")
