"""DraftSetup: speculative decoding as resolved from the settings, before loading. Does not import torch."""

from dataclasses import dataclass, replace

from pagoda.base.config import EngineConfig, ModelConfig
from pagoda.base.config_fit import pipeline_depth
from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.speculative_config import SpeculativeConfig, resolve_speculative
from pagoda.loading.model_config import read_model
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.resolve import resolve_model
from pagoda.loading.weight_memory import PreparedAs, weight_memory
from pagoda.worker.memory import kv_block_bytes
from pagoda.worker.speculation.drafter import MAX_DRAFT_STEP_TOKENS

_LONGEST_ROWS = 2  # rows of full length that the draft model's KV cache holds


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The resolved settings.

    files: the draft model, or None.   num_layers: of the model itself, for drafting (layer_skip); else 0.
    num_blocks: of the draft model's KV cache.   memory_bytes: of its weights, its KV cache and a step's activations.
    num_steps_ahead: steps that may be scheduled before the result of the current one is back.
    """

    config: SpeculativeConfig
    files: ModelFiles | None = None
    num_layers: int = 0
    num_blocks: int = 0
    memory_bytes: int = 0
    num_steps_ahead: int = 0

    @property
    def max_drafts(self) -> int:
        return self.config.num_speculative_tokens


def resolve_drafting(
    config: EngineConfig, spec: ModelSpec, dtype: str, kernels: str, max_model_len: int
) -> DraftSetup | None:
    """Return what is needed to draft for a model, or None for no speculation.

    Raises ConfigError that names the setting, its value and what is allowed.
    """
    speculative = resolve_speculative(config.scheduler.speculative_config)
    if speculative is None:
        return None
    runs_model = speculative.method in ("layer_skip", "draft_model", "forced")
    if runs_model and config.parallel.executor == "fake":
        raise ConfigError(
            f"speculative_config.method={speculative.method} needs an executor with a model; take ngram or suffix"
        )
    if speculative.method == "layer_skip":
        setup = DraftSetup(speculative, num_layers=_num_draft_layers(speculative, spec))
    elif speculative.method == "draft_model":
        setup = _with_draft_model(speculative, config, spec, dtype, kernels, max_model_len)
    else:
        setup = DraftSetup(speculative)
    return replace(setup, num_steps_ahead=pipeline_depth(config) - 1)


def _num_draft_layers(speculative: SpeculativeConfig, spec: ModelSpec) -> int:
    asked = speculative.num_draft_layers
    num_layers = max(1, spec.num_layers // 3) if asked is None else asked
    if num_layers >= spec.num_layers:
        raise ConfigError(
            f"speculative_config.num_draft_layers={num_layers} must be less than the model's {spec.num_layers} layers"
        )
    return num_layers


def _with_draft_model(
    speculative: SpeculativeConfig,
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    kernels: str,
    max_model_len: int,
) -> DraftSetup:
    assert speculative.model is not None
    own, max_drafts = config.model, speculative.num_speculative_tokens
    files = resolve_model(
        ModelConfig(model=speculative.model, revision=speculative.revision, source=own.source, cache_dir=own.cache_dir)
    )
    if files.format == "gguf" and speculative.quantization is None and own.quantization == "none":
        speculative = replace(speculative, quantization="none")
    model = read_model(files)
    wrong = None
    if not model.generates:
        wrong = "does not generate text"
    elif model.media_encoder is not None:  # drafts are made of token ids alone
        wrong = "has an encoder"
    elif model.has_states:  # they do not go back to a rejected draft
        wrong = "has recurrent layers"
    if wrong is not None:
        raise ConfigError(
            f"speculative_config.model={speculative.model!r} ({model.spec.architecture}) {wrong}: take a decoder of "
            "text alone with attention in all layers, with the same vocabulary"
        )
    if model.spec.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"speculative_config.model={speculative.model!r} has {model.spec.vocab_size} token ids, the model "
            f"{spec.vocab_size}: they must have the same vocabulary"
        )
    num_positions = max_model_len + max_drafts + 1
    num_blocks = _LONGEST_ROWS * -(-num_positions // config.cache.block_size) * len(model.kv_groups)
    prepared = PreparedAs(
        dtype, speculative.quantization, kernels == "native", num_positions, for_triton=kernels == "triton"
    )
    kv_bytes = (num_blocks + 1) * kv_block_bytes(model.kv_groups, dtype, config.cache.block_size)
    memory_bytes = weight_memory(files, prepared) + kv_bytes + _activation_bytes(model.spec)
    return DraftSetup(speculative, files, num_blocks=num_blocks, memory_bytes=memory_bytes)


def _activation_bytes(spec: ModelSpec) -> int:
    """Return the most bytes that a forward pass of the draft model needs for its tokens, in float32.

    Per token: the hidden state, its norm, queries, keys, values and the output of attention (at most about eight times
    the hidden size), the two halves of the MLP and their product, and a row of logits.
    """
    per_token = 8 * spec.hidden_size + 3 * spec.intermediate_size + spec.vocab_size
    return 4 * MAX_DRAFT_STEP_TOKENS * per_token
