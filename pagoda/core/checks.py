"""What a scheduler refuses: settings that it cannot work with, and requests that it could never serve."""

import numpy as np

from pagoda.base.config import SchedulingMode
from pagoda.base.errors import ConfigError, RequestError
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import Request, RequestStatus
from pagoda.core.request_state import RequestState, Sequence
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.state import SchedulerState
from pagoda.core.stops import find_end


def make_request_state(state: SchedulerState, request: Request) -> RequestState:
    """Return the request with its sequences. Sequences that had ended before a restart are ended already."""
    _check(state, request)
    made = RequestState(request, state.policy.key(request), awaiting_fork=not request.prior_output)
    prompt = np.ascontiguousarray(request.prompt_token_ids, np.int32)
    for index in range(request.num_seqs):
        prior = request.prior_output[index] if request.prior_output else ()
        tokens = np.concatenate((prompt, np.array(prior, np.int32))) if prior else prompt
        made.sequences.append(Sequence(made, index, tokens, end=_end_after(state, request, prior)))
    if not made.unfinished:
        raise RequestError("every sequence of prior_output has ended already", "prior_output")
    return made


def why_never(state: SchedulerState, request: RequestState) -> str | None:
    """Return why a waiting request can never be served: too many blocks or sequences, or too long for a step."""
    config, num_blocks, num_prompt = state.config, state.kv.num_blocks, request.spec.num_prompt_tokens
    need, num_seqs, longest = state.kv.most_blocks(request), len(request.unfinished), config.max_num_batched_tokens
    if need > num_blocks:
        return f"needs {need} KV blocks of the {num_blocks} there are"
    if num_seqs > config.max_num_seqs:
        return f"asks for {num_seqs} sequences at once, max_num_seqs is {config.max_num_seqs}"
    if config.scheduling_mode is SchedulingMode.PHASED and num_prompt > longest:
        return f"has {num_prompt} tokens; a phased step takes {longest} (max_num_batched_tokens)"
    return None


def _check(state: SchedulerState, request: Request) -> None:
    num_tokens, longest = request.num_prompt_tokens, state.table.max_model_len
    if num_tokens == 0:
        raise RequestError("the prompt is empty", "prompt")
    if (request.sampling is None) == (request.pooling is None):
        raise RequestError("exactly one of sampling and pooling parameters must be given", "sampling")
    if num_tokens + (request.sampling is not None) > longest:
        room = "with at least one output token " if request.sampling else ""
        raise RequestError(f"the prompt has {num_tokens} tokens; {room}max_model_len is {longest}", "prompt")
    if request.prior_output and len(request.prior_output) != request.num_seqs:
        raise RequestError(
            f"prior_output must have one entry per sequence ({request.num_seqs}), not {len(request.prior_output)}",
            "prior_output",
        )
    _check_media(state, request)


def _check_media(state: SchedulerState, request: Request) -> None:
    config, limit = state.config, state.encoder.largest_item
    whole = config.no_partial_media and not state.encoder.encoder_decoder
    for item in request.media:
        if item.length > limit:
            raise RequestError(f"a media item has {item.length} tokens; the encoder takes {limit}", "media")
        if whole and item.length > config.max_num_batched_tokens:
            most = config.max_num_batched_tokens
            raise RequestError(f"a media item has {item.length} tokens; a step takes {most} of it whole", "media")


def _end_after(state: SchedulerState, request: Request, prior: tuple[int, ...]) -> RequestStatus | None:
    """Return how a sequence had ended before the engine died, if it had."""
    end = find_end(request, 0, list(prior), state.table.limit_of(request)) if prior else None
    return None if end is None else end.status


def check_config(
    config: SchedulerOptions, kv_groups: tuple[KVGroupSpec, ...], num_blocks: int, max_model_len: int
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
    if kv_groups and all(group.kind is KVGroupKind.CROSS for group in kv_groups):
        raise ConfigError("a model with KV needs at least one full or window KV group")
