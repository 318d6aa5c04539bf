"""`pagoda plan`: what a model and settings will need, before anything is loaded."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.cli.help_format import JsonObject
from pagoda.cli.layouts import Layout, layouts_of, proposal
from pagoda.cli.options import engine_config, engine_options

if TYPE_CHECKING:
    from pagoda.assembly.engine_setup import EngineSetup
    from pagoda.loading.model_files import ModelFiles
    from pagoda.worker.memory import EncoderMemory

TYPICAL_LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Plan:
    """All figures of `pagoda plan`; sizes in bytes, lengths in tokens.

    path: "" if the weights are not there.
    weights_disk, weights_memory: as the checkpoint has them, and what they take once they are prepared.
    adapters_memory: reserved for LoRA adapters.   embeds_memory: for prompt embeddings, with a server's default limits.
    encoder_memory: for what `media` names, with a server's limits.   largest_item: of those, in tokens of the encoder's
        output; 0 for a model of text.
    is_largest_known: of images, whether a file of the model says how large they get; else largest_item is what the
        encoder can read.
    state_bytes: what recurrent layers keep of a sequence.   state_tokens: from one of its snapshots to the next.
    num_states: blocks of states, if attention has blocks of its own, `num_blocks`; else 0.
    device: "cpu", or the GPU's name and memory.   memory_available: free on the device, before anything is loaded.
    is_measured: the worker makes kv_cache smaller by what the largest step takes of a GPU, measured at its start.
    requests_by_length: prompt + output tokens of a request -> how many such requests the KV cache holds at once; empty
        for a model without KV.
    num_workers: weights_memory, adapters_memory and the KV cache are those of each.   layouts: what each would need
        with other numbers of them.   proposal: the fewest that fit.
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
    encoder_memory: "EncoderMemory"
    media: str
    largest_item: int
    is_largest_known: bool
    device: str
    memory_available: int
    kv_bytes_per_token: int
    state_bytes: int
    state_tokens: int
    num_states: int
    has_windows: bool
    kv_cache: int
    is_measured: bool
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_tokens: int
    requests_by_length: dict[int, int]
    max_num_seqs: int
    num_workers: int
    layouts: list[Layout]
    proposal: str


@engine_options()
def plan(
    options: dict[str, object],
    as_json: JsonObject = False,
    pull: Annotated[bool, typer.Option("--pull", help="Fetch the model first if it is not cached.")] = False,
) -> None:
    """Print what a model and settings need.

    Weights, KV per token, how many tokens and requests fit. Nothing is fetched without --pull: a model of the catalog
    and a folder with only config.json are planned without weights (as floats, but for the catalog's GGUF files, whose
    codes take what the file does); of others it says what would be fetched.
    """
    from pagoda.cli.console import ask_before_fetching, fetching
    from pagoda.loading.outline import outline
    from pagoda.loading.resolve import require_cached, settings_without_weights

    config = engine_config(options)
    described = settings_without_weights(config.model) if not pull else None
    if described is not None:
        stored, codes = _size_of(config)
        if codes:
            config = replace(config, model=replace(config.model, quantization=None))
        with TemporaryDirectory() as folder:
            try:
                made = _plan_or_layouts(config, outline(described, config.model.model, Path(folder), codes), as_json)
            except ConfigError as error:
                raise ConfigError(str(error).replace(folder, config.model.model)) from None
        held = "gguf" if codes else made.weights_as
        made = replace(made, path="", weights_disk=stored or made.weights_disk, weight_types={}, weights_as=held)
    else:
        if not pull:
            require_cached(config.model, "add --pull, or ")
        ask_before_fetching(config.model)
        with fetching():
            made = _plan_or_layouts(config, None, as_json)
    if as_json:
        print(json.dumps(asdict(made)))
    else:
        _print(made)


def _plan_or_layouts(config: EngineConfig, files: "ModelFiles | None", as_json: bool) -> Plan:
    """As `make_plan`; where one worker is too small, print what others need, and add the proposal to the error."""
    try:
        return make_plan(config, files)
    except CapacityError as error:
        layouts = layouts_of(config, files)
        if layouts[0].fits:  # more workers would not help: it is the settings that ask for too much
            raise
        if not as_json:
            _print_layouts(layouts)
        raise CapacityError(f"{error}; {_proposal(config, layouts)}") from None


def _proposal(config: EngineConfig, layouts: Sequence[Layout]) -> str:
    from pagoda.worker.devices import select_device

    return proposal(layouts, select_device(config.parallel).is_host)


def _size_of(config: EngineConfig) -> tuple[int, int]:
    """Return what the weights of a model of the catalog take on disk (0 for another), and as codes, if they stay so."""
    from pagoda.loading.catalog import CATALOG
    from pagoda.loading.known_names import full_name

    model, name = config.model, full_name(config.model.model)
    if name not in CATALOG:
        return 0, 0
    known = CATALOG[name]
    stays = known.is_gguf and model.quantization in (None, "gguf") and "dtype" not in (config.given or ())
    return known.num_bytes, known.num_bytes if stays else 0


def make_plan(config: EngineConfig, files: "ModelFiles | None" = None) -> Plan:
    """Size everything as the engine would, from the model's headers. Raises CapacityError when too little fits.

    files: of the model, if it is not to be resolved.
    """
    from pagoda.assembly.engine_setup import options_of, resolve_engine
    from pagoda.assembly.sizing import (
        adapters_in_memory,
        embeds_in_memory,
        encoder_in_memory,
        fit_cache,
        weights_in_memory,
    )
    from pagoda.core.kv import KVSizing
    from pagoda.kernels.linear.forms import GGUF_TYPES
    from pagoda.loading.model_config import read_images, summarize_weights
    from pagoda.loading.quantization import resolve_quantization
    from pagoda.worker.memory import kv_bytes_per_token, state_bytes

    setup, capacity = fit_cache(resolve_engine(config, files))
    layouts = layouts_of(config, files)
    config = setup.config
    weights = summarize_weights(setup.files)
    held = resolve_quantization(setup.files, config.model.quantization)
    if held == "gguf" and not GGUF_TYPES.keys() & weights.bytes_by_type:
        held = None  # all of its tensors are floats, or become floats
    options = options_of(setup)
    sizing = KVSizing.of(setup.groups, capacity.block_size, setup.max_model_len, options)
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
        weights_as=held or setup.dtype,
        adapters_memory=adapters_in_memory(setup),
        embeds_memory=embeds_in_memory(setup).total,
        encoder_memory=encoder_in_memory(setup),
        media=_name_of_media(setup),
        largest_item=setup.largest_item,
        is_largest_known=setup.encoder is None or setup.crosses or read_images(setup.files) is not None,
        device=setup.device.summary(),
        memory_available=setup.device.free_bytes(),
        kv_bytes_per_token=kv_bytes_per_token(setup.groups, setup.kv_dtype),
        state_bytes=state_bytes(setup.groups, setup.kv_dtype),
        state_tokens=sizing.snapshot_tokens,
        num_states=capacity.num_states,
        has_windows=any(setup.spec.layer_windows),
        kv_cache=capacity.pool_bytes,
        is_measured=not setup.device.is_host and config.cache.kv_cache_memory is None,
        num_blocks=capacity.num_blocks,
        block_size=sizing.block_size,
        max_model_len=setup.max_model_len,
        kv_tokens=capacity.max_tokens,
        requests_by_length={
            length: sizing.num_requests(capacity.num_blocks, length, options.max_encoder_len)
            for length in sorted(lengths)
            if setup.groups
        },
        max_num_seqs=config.scheduler.max_num_seqs,
        num_workers=config.parallel.world_size,
        layouts=layouts,
        proposal=_proposal(config, layouts),
    )


def _print(made: Plan) -> None:
    from pagoda.base.abbreviate import human_bytes
    from pagoda.cli.console import human_count, print_table

    rows: list[tuple[str, str]] = []
    measured = "" if not made.is_measured else ", less what the largest step takes, which is measured at the start"
    types = ", ".join(f"{name} {human_bytes(size)}" for name, size in made.weight_types.items())
    window = " at first; layers with a sliding window stop growing" if made.has_windows else ""
    rows.append(("model", f"{made.model} ({made.architecture}, {made.num_parameters / 1e6:.1f} M parameters)"))
    stored = f"on disk ({types})" if made.path else "to be fetched; what follows is computed from the model's config"
    rule = ", by the size of the file" if made.weights_as == "gguf" and not made.path else ""
    rows.append(("weights", f"{human_bytes(made.weights_disk)} {stored}"))
    rows.append(("", f"about {human_bytes(made.weights_memory)} in memory as {made.weights_as}{rule}"))
    if made.adapters_memory:
        rows.append(("LoRA adapters", f"up to {human_bytes(made.adapters_memory)}"))
    if made.embeds_memory:
        rows.append(("prompt embeddings", f"up to {human_bytes(made.embeds_memory)}, with a server's default limits"))
    if (media := made.encoder_memory).total:
        outputs, scratch, held = (human_bytes(size) for size in (media.outputs, media.scratch, media.features))
        why = "" if made.is_largest_known else ", the encoder's most: there is no preprocessor_config.json"
        rows.append((made.media, f"{scratch} to compute one of up to {human_count(made.largest_item)} tokens{why}"))
        rows.append(("", f"{outputs} for computed ones that are kept"))
        if media.features:
            rows.append(("", f"up to {held} for those of requests that wait, on a server"))
    if made.device != "cpu":
        rows.append(("device", made.device))
    rows.append(("memory", f"{human_bytes(made.memory_available)} available"))
    if made.kv_bytes_per_token == made.state_bytes == 0:
        rows.append(("KV", "none: all tokens of a text are computed in one step"))
        rows.append(("longest text", f"{human_count(made.max_model_len)} tokens"))
    else:
        if made.kv_bytes_per_token:
            rows.append(("KV per token", f"{human_count(made.kv_bytes_per_token)} B as {made.kv_dtype}{window}"))
        if made.state_bytes:
            held = f"up to three per running sequence, and one per {human_count(made.state_tokens)} cached tokens"
            rows.append(("state", f"{human_bytes(made.state_bytes)}: {held}"))
            if made.num_states:
                size = human_bytes(made.num_states * made.state_bytes)
                rows.append(("", f"{human_count(made.num_states)} fit ({size} of the KV cache)"))
        rows.append(
            (
                "KV cache",
                f"{human_bytes(made.kv_cache)}: {human_count(made.num_blocks)} blocks of {made.block_size} tokens"
                + measured,
            )
        )
        alone = f"the cache would hold one of {human_count(made.kv_tokens)}"
        rows.append(("longest request", f"{human_count(made.max_model_len)} tokens ({alone})"))
    for length, requests in made.requests_by_length.items():
        at_once = f", of which {made.max_num_seqs} run at once" if requests > made.max_num_seqs else ""
        rows.append((f"at {human_count(length)} tokens", f"{human_count(requests)} requests fit{at_once}"))
    rows.append(("workers", made.proposal if made.num_workers == 1 else f"{made.num_workers}; {made.proposal}"))
    print_table(rows)
    if len(made.layouts) > 1:
        print()
        _print_layouts(made.layouts)


def _print_layouts(layouts: Sequence[Layout]) -> None:
    from pagoda.base.abbreviate import human_bytes
    from pagoda.cli.console import human_count, print_table

    tokens = human_count(layouts[0].num_tokens)
    headings = ("tensor parallel", "pipeline parallel", "weights per worker", f"KV of {tokens} tokens", "fits")
    rows: list[tuple[str, ...]] = []
    for one in layouts:
        memory = human_bytes(one.weights), human_bytes(one.kv_bytes)
        sizes = str(one.tensor_parallel_size), str(one.pipeline_parallel_size)
        rows.append((*sizes, *memory, "yes" if one.fits else "no"))
    print_table(rows, headings, right=(0, 1, 2, 3))


def _name_of_media(setup: "EngineSetup") -> str:
    """Return what the model's encoder reads, if it has one."""
    if not setup.crosses:
        return "images"
    return "texts" if setup.encoder is not None and setup.encoder.reads_text else "sounds"
