"""Size the KV pools of a GPU by what its largest steps leave, with smaller steps where those do not fit."""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Protocol

from pagoda.base.errors import CapacityError, StepTooLarge
from pagoda.engine_setup import EngineSetup, fit_cache
from pagoda.worker.memory import KVCapacity

logger = logging.getLogger("pagoda")

_FEWEST_TOKENS = 256
"""Tokens per step that are worth a GPU."""

_ENOUGH_TOKENS = 2048
"""Tokens per step that most prompts need: as long as there are more, sequences that run at once are not given up."""


class UnstartedWorker(Protocol):
    """What is asked of a worker that has not started yet."""

    def free_for_cache(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return the bytes that steps of this size leave next to the weights. Raises StepTooLarge."""
        ...

    def set_pools(self, num_blocks: int, num_host_blocks: int) -> None: ...


def measure_capacity(worker: UnstartedWorker, setup: EngineSetup) -> tuple[EngineSetup, KVCapacity]:
    """Load the weights, run the largest steps, and size the worker's pools by what they leave.

    If those steps do not fit, defaults are lowered with a warning. Raises CapacityError that says what would fit if
    the settings were given, or if nothing fits.
    """
    scheduler = setup.config.scheduler
    asked = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    error = None
    for num_seqs, num_tokens in _smaller(setup):
        try:
            free = worker.free_for_cache(num_seqs, num_tokens)
        except StepTooLarge as too_large:
            error = error or too_large
            continue
        if error is not None:
            setup = _lowered(setup, num_seqs, num_tokens, error)
        setup, capacity = fit_cache(setup, free)
        worker.set_pools(capacity.num_blocks, capacity.num_host_blocks)
        return setup, capacity
    raise CapacityError(
        f"no step fits in the GPU's memory next to the weights, tried down from max_num_seqs={asked[0]} and "
        f"max_num_batched_tokens={asked[1]}; take a smaller model, or quantize it ({error})"
    ) from error


def _smaller(setup: EngineSetup) -> Iterator[tuple[int, int]]:
    """Yield (max_num_seqs, max_num_batched_tokens) as they are, then smaller, as far as other settings allow."""
    scheduler = setup.config.scheduler
    num_seqs, num_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    # Without chunks a step must hold a prompt of max_model_len.
    least = _FEWEST_TOKENS if scheduler.enable_chunked_prefill else setup.max_model_len
    yield num_seqs, num_tokens
    while num_tokens // 2 >= max(least, _ENOUGH_TOKENS, num_seqs):
        num_tokens //= 2
        yield num_seqs, num_tokens
    while num_tokens // 2 >= least or num_seqs > 1:
        num_tokens = max(min(num_tokens, least), num_tokens // 2)
        num_seqs = max(1, min(num_seqs // 2, num_tokens))
        yield num_seqs, num_tokens


def _lowered(setup: EngineSetup, num_seqs: int, num_tokens: int, error: StepTooLarge) -> EngineSetup:
    """Return the setup with these sizes of a step. Raises CapacityError with them if the larger ones were given."""
    scheduler = setup.config.scheduler
    fits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
    said = " and ".join(f"{name}={value}" for name, value in fits.items())
    changed = [name for name, value in fits.items() if getattr(scheduler, name) != value]
    if any(name in (setup.config.given or ()) for name in changed):
        raise CapacityError(f"{error}; {said} would fit") from error
    logger.warning("%s; they are lowered to %s", error, said)
    config = dataclasses.replace(setup.config, scheduler=dataclasses.replace(scheduler, **fits))
    return dataclasses.replace(setup, config=config)
