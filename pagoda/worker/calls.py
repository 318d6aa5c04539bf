"""What is asked of a rank besides steps: the calls, and the records of sizes, of memory and of time."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagoda.core.request import LoraRef


@dataclass(frozen=True, slots=True)
class StepSize:
    """Upper bounds of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a rank has for its KV pools, measured when all ranks have loaded their weights.

    memory: names the memory; ranks that name the same one share it.   free_bytes: of it, next to the largest step if
    one was tried.   block_bytes: of a block of each KV pool on this rank, with all of the layers it computes.
    num_too_large: how many of the sizes of steps that were tried do not fit.   why: the first of them does not; "".
    """

    memory: str
    free_bytes: int
    block_bytes: tuple[int, ...]
    num_too_large: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Time spent in steps, in seconds, by the rank that answers.

    parts: by part of the worker's step.   ops: by kind of op in the forward; empty if it was not recorded.
    num_ops: ops per forward.   region_s: measured overhead of one parallel region.
    """

    num_steps: int
    parts: dict[str, float]
    ops: dict[str, float]
    num_ops: int
    region_s: float


CALLS: Mapping[str, tuple[tuple[type, ...], type]] = {
    "prepare_grammar": ((str,), type(None)),
    "drop_grammar": ((str,), type(None)),
    "load_adapter": ((LoraRef,), type(None)),
    "unload_adapter": ((LoraRef,), type(None)),
    "begin_profile": ((), type(None)),
    "profile": ((), StepProfile),
}
"""The calls: the types of the arguments of each, and that of its result.

prepare_grammar: compile a grammar, on another thread. One that does not compile fails the rows that have it. "" allows
any output: that of a rule which only bounds reasoning.
drop_grammar: forget it; it was prepared, and rows that have it go on.
load_adapter: read a LoRA adapter; on a CPU, steps go on meanwhile. Raises PagodaError that says why it cannot be used.
unload_adapter: free its memory once no row uses it; ignore one that is not loaded. Steps use only what was loaded.
begin_profile, profile: measure the steps in between.
"""
