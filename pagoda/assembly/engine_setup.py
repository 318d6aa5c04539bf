"""EngineSetup: everything that is decided before the weights are loaded, from settings, model and free memory."""

import dataclasses
import logging
from dataclasses import dataclass, field

from pagoda.base.abbreviate import abbreviate
from pagoda.base.config import EngineConfig, ParallelConfig, PrefillConfig, SchedulerConfig
from pagoda.base.config_fit import fit_block_size, fit_defaults, fit_whole_prompts, note_given, pipeline_depth
from pagoda.base.config_rules import check_settings
from pagoda.base.dtypes import WITH_SCALES
from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import ModelTasks, PoolingKind
from pagoda.base.ranks import RankPlace
from pagoda.base.setting import describe_settings
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.loading.model_config import read_images
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.quantization import resolve_quantization
from pagoda.loading.resolve import resolve_model
from pagoda.loading.shares import read_share
from pagoda.models.base import Encoder, Model
from pagoda.worker.devices import Device, select_device
from pagoda.worker.speculation.setup import DraftSetup, resolve_drafting

logger = logging.getLogger("pagoda")


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Everything that is decided before loading the weights.

    config: with all defaults filled in.   groups: of layers that share a block table.
    dtype, kv_dtype: "float32", "bfloat16", "float16" (kv_dtype also "int8" and "fp8").
    max_model_len: longest prompt + output in tokens.   drafting: how drafts are made, or None.
    tasks: what the model can be asked for.   takes_embeds: whether prompts may be given as embeddings.
    encoder: the part of the model's tree that computes images or audio, None for a model that reads neither.
    most_outputs: of the encoder, for an image, a sound or an encoder's text, whatever `max_model_len` is.
    """

    config: EngineConfig
    files: ModelFiles
    spec: ModelSpec
    groups: tuple[KVGroupSpec, ...]
    dtype: str
    kv_dtype: str
    device: Device
    max_model_len: int
    drafting: DraftSetup | None = None
    tasks: ModelTasks = field(default_factory=ModelTasks)
    takes_embeds: bool = False
    encoder: Encoder | None = None
    most_outputs: int = 0

    @property
    def crosses(self) -> bool:
        """Return whether it is an encoder-decoder model: the encoder's outputs are read by cross attention."""
        return any(group.kind is KVGroupKind.CROSS for group in self.groups)

    @property
    def largest_item(self) -> int:
        """Return how many encoder outputs an image, a sound or an encoder's text may have; 0 without an encoder."""
        return self.most_outputs if self.crosses else min(self.most_outputs, self.max_model_len)

    @property
    def is_packed(self) -> bool:
        """Return whether the kernels pack weights into their own form."""
        return self.kernels == "native"

    @property
    def kernels(self) -> str:
        """Return which kernels are used, if they can be had on this machine."""
        return self.device.chosen_kernels(self.config.parallel.kernels)

    @property
    def embeds_size(self) -> int:
        """Return the elements of a prompt embedding; 0 if neither callers nor prompt adapters may give any."""
        model = self.config.model
        is_asked = model.enable_prompt_embeds or model.lora.enable_lora
        return self.spec.hidden_size if is_asked and self.takes_embeds else 0

    @property
    def max_drafts(self) -> int:
        """Return the most tokens that may be written past the end of a row."""
        return self.drafting.max_drafts if self.drafting else 0

    @property
    def num_positions(self) -> int:
        """Return the positions per row: a step in flight may write tokens past the end of a finished row."""
        return self.max_model_len + self.max_drafts + 1


def resolve_engine(config: EngineConfig, files: ModelFiles | None = None) -> EngineSetup:
    """Find the model, fill in defaults, and check the settings against each other and the model. Loads no weights.

    files: the model, if it was resolved already.
    Raises ConfigError that names the setting, its value and what is allowed.
    """
    check_settings(config)
    config = note_given(config)
    files = files or resolve_model(config.model)
    own = resolve_quantization(files, None) if config.model.quantization is None else None
    if own in ("gguf", "mxfp4"):
        # Written down, because ranks resolve settings again in which the dtype is filled in.
        chosen = own if config.model.dtype == "auto" else "none"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization=chosen))
    model = read_share(files, config.model.quantization, RankPlace(0, config.parallel.tensor_parallel_size))
    if config.parallel.pipeline_parallel_size > 1:
        read_share(files, config.model.quantization, largest_ranks(config.parallel)[0])  # to check that there is one
    spec = model.spec
    device = select_device(config.parallel)
    if config.parallel.world_size > 1 and not device.joins_ranks:
        raise ConfigError(
            f"device={device.name!r} does not go with tensor_parallel_size or pipeline_parallel_size above 1 yet; take "
            "device='cpu', or one worker"
        )
    tasks = _tasks(config, model)
    config = config if tasks.is_causal else fit_whole_prompts(config)
    if config.model.enable_prompt_embeds and not model.takes_embeds:
        raise ConfigError(f"enable_prompt_embeds: {files.name!r} does not take prompts as embeddings; leave it out")
    longest = _max_model_len(config, spec, tasks.plan.max_seq_length)
    config, max_model_len = fit_defaults(config, longest, device.is_host)
    if device.chosen_kernels(config.parallel.kernels) == "native":
        config = fit_block_size(config)
    kernels = device.chosen_kernels(config.parallel.kernels)
    asked = _asked_dtype(config, kernels)
    dtype = device.fit_dtype(_dtype(asked, spec.torch_dtype), asked)
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    if kv_dtype not in (dtype, "int8") and kernels == "native":
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r} with dtype={dtype!r}: the native kernels hold the cache in the compute dtype "
            "or int8; take 'auto' or 'int8', or kernels='torch'"
        )
    _check_fp8(config, kernels)
    scheduler_options(config).check(max_model_len)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=dtype, max_model_len=max_model_len),
        cache=dataclasses.replace(config.cache, kv_cache_dtype=kv_dtype),
        parallel=dataclasses.replace(config.parallel, device=device.name),
    )
    drafting = resolve_drafting(config, spec, dtype, kernels, max_model_len)
    _check_encoder(config, model, device.is_host, drafting is not None)
    if model.cpu_only and not (device.is_host and kernels != "triton"):
        raise ConfigError(
            f"models of architecture {spec.architecture!r} have {model.cpu_only}, which does not run on a GPU or in "
            "Triton yet; take device='cpu'"
        )
    _check_latent(config, model, device.is_host, kernels)
    _check_states(config, model, device.is_host and kernels != "triton", drafting)
    _check_tier(config, model, device.is_host)
    if drafting is not None and not tasks.generates:
        raise ConfigError(f"speculative_config: {files.name!r} does not generate text, so nothing can be drafted")
    return EngineSetup(
        config,
        files,
        spec,
        model.kv_groups,
        dtype,
        kv_dtype,
        device,
        max_model_len,
        drafting,
        tasks,
        model.takes_embeds,
        model.media_encoder,
        _most_outputs(model, files),
    )


def _most_outputs(model: Model, files: ModelFiles) -> int:
    """Return how many outputs the encoder makes of the largest item, of images as they are processed."""
    encoder = model.media_encoder
    if encoder is None:
        return 0
    most, images = encoder.largest_item().length, None if model.cross_groups else read_images(files)
    return most if images is None else min(most, images.max_item_tokens)


def _check_encoder(config: EngineConfig, model: Model, is_on_host: bool, drafts: bool) -> None:
    """Raise ConfigError for what does not go with a model that has an encoder."""
    if model.media_encoder is None:
        return
    if not is_on_host and model.cross_groups:
        raise ConfigError(f"encoder-decoder models ({model.spec.architecture}) do not run on a GPU; take device='cpu'")
    if not is_on_host:
        raise ConfigError(
            f"models of architecture {model.spec.architecture!r} do not run on a GPU yet with what reads images or "
            "audio; take device='cpu', or the text model alone: hf_overrides={'architectures': ['Gemma3ForCausalLM']} "
            "of Gemma 3, ['Ministral3ForCausalLM'] of Mistral 3"
        )
    if model.media_encoder.whole_items and config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.parallel.pipeline_parallel_size} does not go with images whose tokens "
            "attend to each other (Gemma 3); take tensor_parallel_size"
        )
    if model.cross_groups and config.parallel.executor == "fake":
        raise ConfigError("distributed_executor_backend='fake' does not go with an encoder-decoder model; leave it out")
    if model.cross_groups and config.model.lora.enable_lora:
        raise ConfigError("enable_lora does not go with an encoder-decoder model yet; leave it out")
    if model.cross_groups and drafts:
        raise ConfigError("speculative_config does not go with an encoder-decoder model; leave it out")


def _check_latent(config: EngineConfig, model: Model, is_on_host: bool, kernels: str) -> None:
    """Raise ConfigError for what does not go with latent attention."""
    pages = [group.shape for group in model.kv_groups if group.kind is not KVGroupKind.STATE]
    if all(shape.key_dim == shape.value_dim for shape in pages):
        return
    if not is_on_host or kernels == "triton":
        raise ConfigError(
            f"models of architecture {model.spec.architecture!r} have latent attention, which does not run on a GPU or "
            "in Triton yet; take device='cpu'"
        )
    if config.cache.kv_cache_dtype == "int8" and kernels == "native":
        raise ConfigError(
            f"kv_cache_dtype='int8': models of architecture {model.spec.architecture!r} have latent attention, whose "
            "cache the native kernels hold in the compute dtype; take 'auto', or kernels='torch'"
        )


def _check_states(config: EngineConfig, model: Model, has_kernels: bool, drafting: DraftSetup | None) -> None:
    """Raise ConfigError for what does not go with recurrent layers."""
    if not model.has_states:
        return
    what = f"models of architecture {model.spec.architecture!r} have recurrent layers"
    if not has_kernels:
        raise ConfigError(f"{what}, which do not run on a GPU or in Triton yet; take device='cpu'")
    if drafting is not None and drafting.num_layers:
        raise ConfigError(
            f"speculative_config.method='layer_skip': {what}, and the states of the first layers would not go back; "
            "take 'ngram', 'suffix', 'draft_model' or 'forced'"
        )
    if config.cache.kv_cache_dtype != config.model.dtype:
        raise ConfigError(
            f"kv_cache_dtype={config.cache.kv_cache_dtype!r}: {what}, whose states are kept in the compute dtype, "
            f"{config.model.dtype!r}; take 'auto'"
        )


def _check_tier(config: EngineConfig, model: Model, is_on_host: bool) -> None:
    """Raise ConfigError for what does not go with files of KV blocks."""
    if config.cache.kv_tier is None:
        return
    if not is_on_host:
        raise ConfigError("kv_tier does not go with a GPU yet: leave it out, or take device='cpu'")
    if [group.kind for group in model.kv_groups] != [KVGroupKind.FULL]:
        kinds = ", ".join(sorted({group.kind.value for group in model.kv_groups})) or "no"
        raise ConfigError(
            f"kv_tier: models of architecture {model.spec.architecture!r} have {kinds} attention, and blocks are kept "
            "only of models whose layers all attend to every earlier token: leave it out"
        )


def largest_ranks(parallel: ParallelConfig) -> list[RankPlace]:
    """Return the rank of each stage that has most of its weights: the last has what does not divide."""
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return [RankPlace(size - 1, size, stage, stages) for stage in range(stages)]


def _tasks(config: EngineConfig, model: Model) -> ModelTasks:
    """Return what the model can be asked for, with the pooling that the settings choose."""
    if model.cross_groups:  # what its decoder has read by the end of a prompt is not a vector of the encoder's input
        return dataclasses.replace(model.tasks, plan=dataclasses.replace(model.tasks.plan, embeds=False))
    plan, given = model.tasks.plan, config.model.hf_overrides
    if given.pooling_type != "auto":
        plan = dataclasses.replace(plan, kind=PoolingKind(given.pooling_type))
    if given.is_matryoshka:
        plan = dataclasses.replace(plan, sizes=())
    elif lengths := given.matryoshka_dimensions:
        if not all(length.isdecimal() and int(length) for length in lengths):
            raise ConfigError(f"hf_overrides: matryoshka_dimensions={abbreviate(lengths)} must be positive integers")
        plan = dataclasses.replace(plan, sizes=tuple(map(int, lengths)))
    return dataclasses.replace(model.tasks, plan=plan)


def options_of(setup: EngineSetup) -> SchedulerOptions:
    """Return the options of an engine's scheduler."""
    options = scheduler_options(setup.config)
    if setup.encoder is None:
        return options
    budget = max(setup.largest_item, setup.config.scheduler.max_num_batched_tokens)
    return dataclasses.replace(
        options,
        encoder_budget=budget,
        encoder_cache_tokens=_CACHED_BUDGETS * budget,
        no_partial_media=setup.encoder.whole_items,
        max_encoder_len=setup.largest_item if setup.crosses else 0,
    )


_CACHED_BUDGETS = 4
"""Steps' worth of encoder outputs that are kept."""


def scheduler_options(config: EngineConfig) -> SchedulerOptions:
    """Return the options of a scheduler without encoder: the settings, and the values derived from them."""
    scheduler, prefill, debug = config.scheduler, config.scheduler.prefill, config.debug
    settings = {
        item.name: getattr(scheduler, item.name) for item in describe_settings(SchedulerConfig) if not item.is_group
    }
    del settings["scheduler_cls"]
    return SchedulerOptions(
        **{**settings, "async_scheduling": bool(scheduler.async_scheduling)},
        **{item.name: getattr(prefill, item.name) for item in describe_settings(PrefillConfig)},
        pipeline_depth=pipeline_depth(config),
        num_stages=config.parallel.pipeline_parallel_size,
        has_followers=config.parallel.world_size > 1,
        prefix_hash_seed=debug.prefix_hash_seed,
        max_loras=config.model.lora.num_per_step if config.model.lora.enable_lora else 0,
        check_invariants=debug.check_invariants,
        decision_log_steps=debug.decision_log_steps,
    )


def _check_fp8(config: EngineConfig, kernels: str) -> None:
    """Raise ConfigError for weights of 8-bit floats on the native kernels, which do not multiply them."""
    speculative = config.scheduler.speculative_config
    asked = {
        "quantization": config.model.quantization,
        "speculative_config.quantization": None if speculative is None else speculative.quantization,
    }
    for name, quantization in asked.items():
        if quantization == "fp8" and kernels == "native":
            raise ConfigError(
                f"{name}='fp8' needs a GPU: the native kernels have none; take 'int8', or kernels='torch', which "
                "computes with the rounded weights in the compute dtype"
            )


def _asked_dtype(config: EngineConfig, kernels: str) -> str:
    """The dtype that was asked for; the cache's where only that was given and the native kernels need both alike."""
    kv_dtype = config.cache.kv_cache_dtype
    if config.model.dtype == "auto" and kernels == "native" and kv_dtype not in ("auto", *WITH_SCALES):
        return kv_dtype
    return config.model.dtype


def _max_model_len(config: EngineConfig, spec: ModelSpec, max_seq_length: int | None) -> int:
    """max_seq_length: what the model's pooling was made for, if anything."""
    asked = config.model.max_model_len
    if asked is None:
        return min(spec.max_position, max_seq_length or spec.max_position)
    if not 1 <= asked <= spec.max_position:
        raise ConfigError(f"max_model_len={asked} must be in 1 .. {spec.max_position}, the model's own limit")
    return asked


def _dtype(asked: str, checkpoint: str) -> str:
    if asked != "auto":
        return asked
    return checkpoint if checkpoint in ("float32", "bfloat16", "float16") else "bfloat16"
