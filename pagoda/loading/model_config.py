"""Read a model's configuration and the sizes of its weights, without torch and without loading the weights."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import MXFP4
from pagoda.loading.ctranslate2 import CTranslate2File
from pagoda.loading.gguf_file import GGUFFile, open_gguf
from pagoda.loading.model_files import PROCESSORS, ModelFiles, read_json_object
from pagoda.loading.quantization import MXFP4_BLOCKS, MXFP4_SCALES, packed_format, read_format
from pagoda.loading.safetensors_header import read_headers
from pagoda.loading.sentence_transformers import MODULES, read_pooling
from pagoda.loading.token_ids import end_token_ids, find_token_ids
from pagoda.models.architecture import Architecture, TreeConfig
from pagoda.models.base import Dense, Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.image_config import ImageConfig, read_image_config
from pagoda.models.pooled_decoder import TOKEN_IDS
from pagoda.models.registry import BY_GGUF_NAME, BY_HF_NAME


@dataclass(frozen=True, slots=True)
class WeightSummary:
    """A checkpoint's weights on disk.

    num_bytes: on disk.   num_parameters: elements.   bytes_by_type: quantisation or dtype name -> bytes on disk,
    largest first, as in {"Q4_1": 66355200, "Q8_0": 30081024, "F32": 140544} or {"BF16": 269030016}; AWQ and GPTQ count
    codes with their scales.
    """

    num_bytes: int
    num_parameters: int
    bytes_by_type: dict[str, int]


def read_model(files: ModelFiles) -> Model:
    """Return the tree of a model, its parameters declared but not loaded. Raises ConfigError as `read_architecture`."""
    return build_tree(files, *read_architecture(files))


def build_tree(files: ModelFiles, architecture: Architecture, config: TreeConfig) -> Model:
    """Return the tree of a model whose settings have been read, with what its folder says about pooling."""
    model = architecture.model(config)
    modules = None
    if files.format == "safetensors":
        modules = read_pooling(files.path, model.pooling, config.spec.hidden_size)
    if modules is not None:
        model.pooling = modules.plan
        model.dense = [Dense(spec) for spec in modules.dense]
    if files.format == "safetensors":
        given = ConfigReader(read_json_object(files.path / "config.json"), str(files.path / "config.json"))
        if given.has("matryoshka_dimensions") or given.flag("is_matryoshka", False):
            model.pooling = replace(model.pooling, sizes=given.ids("matryoshka_dimensions"))
    return model


def read_architecture(files: ModelFiles) -> tuple[Architecture, TreeConfig]:
    """Return a model's architecture and the configuration of its tree.

    Raises ConfigError for an architecture, rope type, activation or layer pattern that is not supported, and names it.
    """
    if files.format == "gguf":
        return _read_gguf(open_gguf(files.path))
    if files.format == "ctranslate2":
        file = CTranslate2File(files.path)
        return _read_settings(ConfigReader(file.settings(), str(file.path)))
    return _read_folder(files)


def read_images(files: ModelFiles) -> ImageConfig | None:
    """Return how a vision-language model's images are processed, None for a folder that does not say.

    Raises ConfigError for a processor that is not supported.
    """
    folder = files.path
    config, processor, stated = (
        ConfigReader(read_json_object(path) if path.is_file() else {}, str(path))
        for path in (folder / name for name in ("config.json", *PROCESSORS))
    )
    preprocessor = processor.section("image_processor") or stated
    return read_image_config(config, processor, preprocessor) if preprocessor.values else None


def summarize_weights(files: ModelFiles) -> WeightSummary:
    """Return sizes and types of a checkpoint's weights, from its headers alone."""
    sizes: Counter[str] = Counter()
    num_parameters = 0
    if files.format == "gguf":
        for tensor in open_gguf(files.path).tensors.values():
            sizes[tensor.type.name] += tensor.num_bytes
            num_parameters += _count(tensor.shape)
    elif files.format == "ctranslate2":
        for variable in CTranslate2File(files.path).variables.values():
            sizes[variable.dtype] += variable.num_bytes
            num_parameters += _count(variable.shape)
    else:
        entries, stored = read_headers(files.path, _dense_folders(files)), packed_format(files)
        for name, entry in entries.items():
            stem, _, part = name.rpartition(".")
            if stored is not None and f"{stem}.{stored.layout.marker}" in entries and part in stored.layout.parts:
                sizes[stored.method.upper()] += entry.num_bytes
                num_parameters += _count(entry.shape) * stored.codes_per_word if part == stored.layout.codes else 0
            elif name.endswith((MXFP4_BLOCKS, MXFP4_SCALES)) and entry.dtype == "U8":
                sizes[MXFP4.name] += entry.num_bytes
                num_parameters += _count(entry.shape) * 2 if name.endswith(MXFP4_BLOCKS) else 0
            else:
                sizes[entry.dtype] += entry.num_bytes
                num_parameters += _count(entry.shape)
    return WeightSummary(sizes.total(), num_parameters, dict(sizes.most_common()))


def _dense_folders(files: ModelFiles) -> list[str]:
    """Return the folders of the layers after a pooling."""
    return [layer.folder for layer in read_model(files).dense] if (files.path / MODULES).is_file() else []


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _read_folder(files: ModelFiles) -> tuple[Architecture, TreeConfig]:
    folder = files.path
    values = read_json_object(folder / "config.json") | files.overrides.changed()
    config = ConfigReader(values, str(folder / "config.json"))
    tokens = config.texts("classifier_from_token")
    if tokens:
        values[TOKEN_IDS] = find_token_ids(folder, tokens)
    architecture, facts = _read_settings(config)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = ConfigReader(read_json_object(generation), str(generation)).ids("eos_token_id")
        if eos:
            facts = replace(facts, spec=replace(facts.spec, eos_token_ids=tuple(dict.fromkeys(eos))))
    return architecture, facts


def _read_settings(config: ConfigReader) -> tuple[Architecture, Any]:
    names = config.texts("architectures")
    if not names:
        raise ConfigError(f"{config.origin}: 'architectures' is missing; it should name the model's class")
    try:
        architecture = BY_HF_NAME[names[0]]
    except ConfigError as error:
        raise ConfigError(f"{config.origin}: {error}") from None
    read_format(config)  # weights packed in a way that is not supported are refused first
    return architecture, architecture.read(config)


# GGUF keys after "{architecture}." and their names in config.json.
_GGUF_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GGUF_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
}


def _read_gguf(file: GGUFFile) -> tuple[Architecture, TreeConfig]:
    name = file.require("general.architecture", str)
    try:
        candidates = BY_GGUF_NAME[name]
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    num_experts = file.get(f"{name}.expert_count", int) or 0
    matching = [candidate for candidate in candidates if candidate.experts == (num_experts > 0)]
    if not matching:
        raise ConfigError(
            f"{file.path}: {name}.expert_count = {num_experts}: pagoda knows {name!r} only "
            f"{'with' if candidates[0].experts else 'without'} experts"
        )
    architecture = matching[0]
    values = _hf_words(file, name)
    values |= architecture.gguf_settings(values)
    return architecture, architecture.read(ConfigReader(values, str(file.path)))


def _hf_words(file: GGUFFile, name: str) -> dict[str, object]:
    """Return a GGUF file's metadata with the keys of a config.json."""
    values: dict[str, object] = {ours: file.get(f"{name}.{key}", int) for key, ours in _GGUF_INTEGERS.items()}
    values |= {ours: file.get(f"{name}.{key}", float) for key, ours in _GGUF_NUMBERS.items()}
    values["head_dim"] = head_dim = _head_dim(file, name)
    turned = file.get(f"{name}.rope.dimension_count", int)
    values["partial_rotary_factor"] = None if turned is None else turned / head_dim
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing or does not have two dimensions")
    values["vocab_size"] = embedding.shape[0]
    if (token_types := file.tensors.get("token_types.weight")) is not None:
        values["type_vocab_size"] = token_types.shape[0]
        values["pooling_type"] = file.get(f"{name}.pooling_type", int) or None
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & file.tensors.keys())
    values["attention_out_bias"] = "blk.0.attn_output.bias" in file.tensors
    values["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    values["eos_token_id"] = list(end_token_ids(file))
    values["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id", int)
    values["dtype"] = _natural_dtype(file)
    values["use_parallel_residual"] = file.get(f"{name}.use_parallel_residual", bool)
    values["one_norm"] = "blk.0.ffn_norm.weight" not in file.tensors
    values["rope_scaling"] = _longrope(file, f"{name}.rope.scaling") or _rope_scaling(file, f"{name}.rope.scaling")
    return values


_MOST_FACTORS_BYTES = 4 * 1025  # one more factor than the settings' reader takes


def _longrope(file: GGUFFile, prefix: str) -> dict[str, object] | None:
    """Return LongRoPE's parameters, whose factors are tensors; None without them."""
    factors: dict[str, object] = {}
    for kind in ("short", "long"):
        tensor = file.tensors.get(f"rope_factors_{kind}.weight")
        if tensor is None or tensor.type.name != "F32":
            return None
        factors[f"{kind}_factor"] = file.bytes_of(tensor)[:_MOST_FACTORS_BYTES].cast("f").tolist()
    return {
        **factors,
        "rope_type": "longrope",
        "original_max_position_embeddings": file.require(f"{prefix}.original_context_length", int),
        "attention_factor": file.get(f"{prefix}.attn_factor", float),
    }


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, object] | None:
    kind = file.get(f"{prefix}.type", str)
    if kind is None or kind == "none":
        return None
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if file.get(f"{prefix}.{key}", float) not in (None, 1.0):
            raise ConfigError(f"{file.path}: {prefix}.{key} = {file.metadata[f'{prefix}.{key}']} is not supported")
    return {
        "rope_type": kind,
        "factor": file.get(f"{prefix}.factor", float),
        "original_max_position_embeddings": file.get(f"{prefix}.original_context_length", int),
        "beta_fast": file.get(f"{prefix}.yarn_beta_fast", float),
        "beta_slow": file.get(f"{prefix}.yarn_beta_slow", float),
    }


def _head_dim(file: GGUFFile, name: str) -> int:
    heads = file.require(f"{name}.attention.head_count", int)
    derived = file.require(f"{name}.embedding_length", int) // max(heads, 1)
    head_dim = file.get(f"{name}.attention.key_length", int) or derived
    other = file.get(f"{name}.attention.value_length", int)
    if other is not None and other != head_dim:
        raise ConfigError(
            f"{file.path}: {name}.attention.value_length = {other} with heads of {head_dim} is not supported"
        )
    return head_dim


def _natural_dtype(file: GGUFFile) -> str:
    """Return a guess of the weights' dtype before they were quantised."""
    kinds: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2:
            kinds[tensor.type.name] += tensor.num_bytes
    largest = kinds.most_common(1)[0][0] if kinds else ""
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")
