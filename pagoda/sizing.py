"""Size the KV pools by what the ranks measure: on a GPU next to its largest steps, or to smaller ones if those fit."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from pagoda.base.errors import CapacityError, StepTooLarge
from pagoda.core.executor import Capacity, StepSize
from pagoda.engine_setup import EngineSetup, fit_cache
from pagoda.worker.memory import KVCapacity

logger = logging.getLogger("pagoda")

_FEWEST_TOKENS = 256
"""Tokens per step that are worth a GPU."""

_ENOUGH_TOKENS = 2048
"""Tokens per step that most prompts need: as long as there are more, sequences that run at once are not given up."""


def sizes_to_try(setup: EngineSetup) -> list[StepSize]:
    """Return the sizes of steps with which a GPU's memory is measured: as the settings say, then smaller ones.

    None where it is not: on the host, and for a number of blocks that was given, as after a restart.
    """
    if setup.device.is_host or setup.config.debug.num_blocks is not None:
        return []
    return list(_smaller(setup))


def fit_measured(
    setup: EngineSetup, planned: KVCapacity | None, capacities: Sequence[Capacity], sizes: Sequence[StepSize]
) -> tuple[EngineSetup, KVCapacity]:
    """Size the pools by what the ranks have measured, with the largest of `sizes` that fits on all of them.

    planned: what was expected before loading, if anything.
    capacities: as Executor.start returns them, for these `sizes`.
    If steps had to be smaller, defaults are lowered with a warning. Raises CapacityError that says what would fit if
    the settings were given, or if the pools do not fit.
    """
    if planned is not None and (not capacities or setup.config.debug.num_blocks is not None):
        return setup, planned
    tightest = max(capacities, key=lambda one: one.num_too_large)
    if tightest.num_too_large:
        setup = _lowered(setup, sizes[tightest.num_too_large], tightest.why)
    setup, measured = fit_cache(setup, capacities)
    if (
        setup.device.is_host and planned is not None
    ):  # where loaded weights may still count as free, for their files can be read again
        measured = min(planned, measured, key=lambda one: one.num_blocks)
    return setup, measured


def no_step_fits(sizes: Sequence[StepSize], error: StepTooLarge) -> CapacityError:
    """Return the error for sizes of steps of which none fits. error: of the first of them."""
    return CapacityError(
        f"no step fits in the GPU's memory next to the weights, tried down from "
        f"max_num_seqs={sizes[0].max_num_seqs} and max_num_batched_tokens={sizes[0].max_num_batched_tokens}; take a "
        f"smaller model, or quantize it ({error})"
    )


def _smaller(setup: EngineSetup) -> Iterator[StepSize]:
    """Yield the sizes of steps as they are, then smaller, as far as other settings allow."""
    scheduler = setup.config.scheduler
    num_seqs, num_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    # Without chunks a step must hold a prompt of max_model_len.
    least = _FEWEST_TOKENS if scheduler.enable_chunked_prefill else setup.max_model_len
    yield StepSize(num_seqs, num_tokens)
    while num_tokens // 2 >= max(least, _ENOUGH_TOKENS, num_seqs):
        num_tokens //= 2
        yield StepSize(num_seqs, num_tokens)
    while num_tokens // 2 >= least or num_seqs > 1:
        num_tokens = max(min(num_tokens, least), num_tokens // 2)
        num_seqs = max(1, min(num_seqs // 2, num_tokens))
        yield StepSize(num_seqs, num_tokens)


def _lowered(setup: EngineSetup, size: StepSize, why: str) -> EngineSetup:
    """Return the setup with these sizes of a step. Raises CapacityError with them if the larger ones were given."""
    scheduler = setup.config.scheduler
    fits = {"max_num_seqs": size.max_num_seqs, "max_num_batched_tokens": size.max_num_batched_tokens}
    said = " and ".join(f"{name}={value}" for name, value in fits.items())
    changed = [name for name, value in fits.items() if getattr(scheduler, name) != value]
    if any(name in (setup.config.given or ()) for name in changed):
        raise CapacityError(f"{why}; {said} would fit")
    logger.warning("%s; they are lowered to %s", why, said)
    config = dataclasses.replace(setup.config, scheduler=dataclasses.replace(scheduler, **fits))
    return dataclasses.replace(setup, config=config)
