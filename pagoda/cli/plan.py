"""`pagoda plan`: what a model and settings will need, before anything is loaded."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from pagoda.base.config import EngineConfig
from pagoda.cli.options import engine_config, engine_options

TYPICAL_LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Plan:
    """All figures of `pagoda plan`; sizes in bytes, lengths in tokens.

    weights_disk, weights_memory: as the checkpoint has them, and what they take once they are prepared.
    adapters_memory: reserved for LoRA adapters.   embeds_memory: for prompt embeddings, with a server's default limits.
    device: "cpu", or the GPU's name and memory.   memory_available: free on the device, before anything is loaded.
    is_measured: the worker makes kv_cache smaller by what the largest step takes of a GPU, measured at its start.
    requests_by_length: prompt + output tokens of a request -> how many such requests the KV cache holds at once; empty
        for a model without KV.
    """

    model: str
    path: str
    architecture: str
    num_parameters: int
    dtype: str
    kv_dtype: str
    weights_disk: int
    weight_types: dict[str, int]
    weights_memory: int
    weights_as: str
    adapters_memory: int
    embeds_memory: int
    device: str
    memory_available: int
    kv_bytes_per_token: int
    has_windows: bool
    kv_cache: int
    is_measured: bool
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_tokens: int
    requests_by_length: dict[int, int]
    max_num_seqs: int


@engine_options()
def plan(
    options: dict[str, object],
    as_json: Annotated[bool, typer.Option("--json", help="Print a single JSON object.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Fetch the model first if it is not cached.")] = False,
) -> None:
    """Print what a model and settings need.

    Weights, KV per token, how many tokens and requests fit. Nothing is fetched without --pull: of a model that is not
    there it says what would be fetched.
    """
    from pagoda.cli.console import fetching
    from pagoda.loading.resolve import require_cached

    config = engine_config(options)
    if not pull:
        require_cached(config.model, "add --pull")
    with fetching():
        made = make_plan(config)
    if as_json:
        print(json.dumps(asdict(made)))
    else:
        _print(made)


def make_plan(config: EngineConfig) -> Plan:
    """Size everything as the engine would, from the model's headers. Raises CapacityError when too little fits."""
    from pagoda.core.kv import KVSizing
    from pagoda.engine_setup import (
        adapters_in_memory,
        embeds_in_memory,
        fit_cache,
        resolve_engine,
        scheduler_options,
        weights_in_memory,
    )
    from pagoda.loading.model_config import summarize_weights
    from pagoda.loading.quantization import resolve_quantization
    from pagoda.worker.memory import kv_bytes_per_token

    setup, capacity = fit_cache(resolve_engine(config))
    config = setup.config
    weights = summarize_weights(setup.files)
    sizing = KVSizing.of(
        setup.groups, capacity.block_size, setup.max_model_len, scheduler_options(config, setup.drafting)
    )
    lengths = {length for length in TYPICAL_LENGTHS if length < setup.max_model_len} | {setup.max_model_len}
    return Plan(
        model=setup.files.name,
        path=str(setup.files.path),
        architecture=setup.spec.architecture,
        num_parameters=weights.num_parameters,
        dtype=setup.dtype,
        kv_dtype=setup.kv_dtype,
        weights_disk=weights.num_bytes,
        weight_types=weights.bytes_by_type,
        weights_memory=weights_in_memory(setup),
        weights_as=resolve_quantization(setup.files, config.model.quantization) or setup.dtype,
        adapters_memory=adapters_in_memory(setup),
        embeds_memory=embeds_in_memory(setup).total,
        device=setup.device.summary(),
        memory_available=setup.device.free_bytes(),
        kv_bytes_per_token=kv_bytes_per_token(setup.groups, setup.kv_dtype),
        has_windows=any(setup.spec.layer_windows),
        kv_cache=capacity.pool_bytes,
        is_measured=not setup.device.is_host and config.cache.kv_cache_memory is None,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_model_len=setup.max_model_len,
        kv_tokens=capacity.max_tokens,
        requests_by_length={
            length: capacity.num_blocks // sizing.blocks_for_request(length)
            for length in sorted(lengths)
            if setup.groups
        },
        max_num_seqs=config.scheduler.max_num_seqs,
    )


def _print(made: Plan) -> None:
    from rich.table import Table

    from pagoda.base.abbreviate import human_bytes
    from pagoda.cli.console import human_count, stdout_console

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    measured = "" if not made.is_measured else ", less what the largest step takes, which is measured at the start"
    types = ", ".join(f"{name} {human_bytes(size)}" for name, size in made.weight_types.items())
    window = " at first; layers with a sliding window stop growing" if made.has_windows else ""
    table.add_row("model", f"{made.model} ({made.architecture}, {made.num_parameters / 1e6:.1f} M parameters)")
    table.add_row("weights", f"{human_bytes(made.weights_disk)} on disk ({types})")
    table.add_row("", f"about {human_bytes(made.weights_memory)} in memory as {made.weights_as}")
    if made.adapters_memory:
        table.add_row("LoRA adapters", f"up to {human_bytes(made.adapters_memory)}")
    if made.embeds_memory:
        table.add_row("prompt embeddings", f"up to {human_bytes(made.embeds_memory)}, with a server's default limits")
    if made.device != "cpu":
        table.add_row("device", made.device)
    table.add_row("memory", f"{human_bytes(made.memory_available)} available")
    if made.kv_bytes_per_token == 0:
        table.add_row("KV", "none: all tokens of a text are computed in one step")
        table.add_row("longest text", f"{human_count(made.max_model_len)} tokens")
    else:
        table.add_row("KV per token", f"{human_count(made.kv_bytes_per_token)} B as {made.kv_dtype}{window}")
        table.add_row(
            "KV cache",
            f"{human_bytes(made.kv_cache)}: {human_count(made.num_blocks)} blocks of {made.block_size} tokens"
            + measured,
        )
        alone = f"the cache would hold one of {human_count(made.kv_tokens)}"
        table.add_row("longest request", f"{human_count(made.max_model_len)} tokens ({alone})")
    for length, requests in made.requests_by_length.items():
        at_once = f", of which {made.max_num_seqs} run at once" if requests > made.max_num_seqs else ""
        table.add_row(f"at {human_count(length)} tokens", f"{human_count(requests)} requests fit{at_once}")
    stdout_console().print(table)
