"""Read a model's configuration and the sizes of its weights, without torch and without loading the weights."""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import MXFP4
from pagoda.loading.ctranslate2 import CTranslate2File
from pagoda.loading.gguf_file import open_gguf
from pagoda.loading.gguf_settings import read_gguf, read_gguf_pooling
from pagoda.loading.model_files import PROCESSORS, ModelFiles, read_json_object
from pagoda.loading.quantization import MXFP4_BLOCKS, MXFP4_SCALES, packed_format, read_format
from pagoda.loading.safetensors_header import read_headers
from pagoda.loading.sentence_transformers import MODULES, read_pooling
from pagoda.loading.token_ids import find_token_ids
from pagoda.models.architecture import Architecture, TreeConfig
from pagoda.models.base import DensePooling, Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.image_config import ImageConfig, read_image_config
from pagoda.models.pooled_decoder import TOKEN_IDS
from pagoda.models.registry import BY_HF_NAME


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
    if files.format == "gguf":
        model.pooling = read_gguf_pooling(open_gguf(files.path), model.pooling)
    modules = None
    if files.format == "safetensors":
        modules = read_pooling(files.path, model.pooling, config.spec.hidden_size)
    if modules is not None:
        model.pooling = replace(modules.plan, is_declared=True)
        model.dense = [DensePooling(spec) for spec in modules.dense]
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
        return read_gguf(open_gguf(files.path))
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
            num_parameters += prod(tensor.shape)
    elif files.format == "ctranslate2":
        for variable in CTranslate2File(files.path).variables.values():
            sizes[variable.dtype] += variable.num_bytes
            num_parameters += prod(variable.shape)
    else:
        entries, stored = read_headers(files.path, _dense_folders(files)), packed_format(files)
        for name, entry in entries.items():
            stem, _, part = name.rpartition(".")
            if stored is not None and f"{stem}.{stored.layout.marker}" in entries and part in stored.layout.parts:
                sizes[stored.method.upper()] += entry.num_bytes
                num_parameters += prod(entry.shape) * stored.codes_per_word if part == stored.layout.codes else 0
            elif name.endswith((MXFP4_BLOCKS, MXFP4_SCALES)) and entry.dtype == "U8":
                sizes[MXFP4.name] += entry.num_bytes
                num_parameters += prod(entry.shape) * 2 if name.endswith(MXFP4_BLOCKS) else 0
            else:
                sizes[entry.dtype] += entry.num_bytes
                num_parameters += prod(entry.shape)
    return WeightSummary(sizes.total(), num_parameters, dict(sizes.most_common()))


def _dense_folders(files: ModelFiles) -> list[str]:
    """Return the folders of the layers after a pooling."""
    return [layer.folder for layer in read_model(files).dense] if (files.path / MODULES).is_file() else []


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
