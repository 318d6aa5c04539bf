"""How weights are stored and held: the settings of AWQ and GPTQ, and `resolve_quantization`. No torch."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from pagoda.base.abbreviate import abbreviate
from pagoda.base.dtypes import QUANTIZATIONS
from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import MADE_WHILE_LOADING, Q4, Q4_ZERO, HeldAs
from pagoda.loading.model_files import ModelFiles, read_json_object
from pagoda.models.config_reader import ConfigReader

BITS = 4
WORD_CODES = 8  # codes in an int32
_LEAST_GROUP = 32
MXFP4 = "mxfp4"
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""What the names of the two tensors of a stack of matrices in MXFP4 end in."""
_WEIGHT = ".weight"
_INSTEAD = "use another quantisation of the model, its bf16 weights (quantization='int8' halves them), or a GGUF"


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the quantised matrices of a checkpoint are stored; those that are not quantised are stored as floats.

    group: elements along a row that share a scale and a zero point, None for all of the row.
    symmetric: all zero points are 8.   stored_zero: what a stored zero point lacks, 1 in GPTQ's first format.
    """

    method: Literal["awq", "gptq"]
    group: int | None
    symmetric: bool
    stored_zero: int = 0

    @property
    def held_as(self) -> HeldAs:
        """Return the form of its codes in memory; elements that share a scale are `group`, or a part of it."""
        group = next(size for size in (128, 64, 32) if self.group is None or self.group % size == 0)
        return HeldAs(Q4 if self.symmetric else Q4_ZERO, group)


def packed_format(files: ModelFiles) -> PackedFormat | None:
    """Return the format of a checkpoint's 4-bit weights, None if it has none. Raises ConfigError as `read_format`."""
    if files.format != "safetensors":
        return None
    path = files.path / "config.json"
    return read_format(ConfigReader(read_json_object(path), str(path)))


def read_format(config: ConfigReader) -> PackedFormat | None:
    """Return what a model's settings say of quantised weights, None if they say nothing.

    Raises ConfigError that names the setting, what is supported, and what to do, for other formats.
    """
    section = config.section("quantization_config")
    if section is None:
        return None
    method = section.values.get("quant_method")
    if method == MXFP4:  # becomes floats while loading
        return None
    if method not in ("awq", "gptq"):
        raise ConfigError(
            f"{section.origin}: quant_method {abbreviate(method)} is not supported; supported: awq, gptq, mxfp4; "
            f"{_INSTEAD}"
        )
    bits = section.integer("bits")
    if bits != BITS:
        raise ConfigError(f"{section.origin}: bits = {bits} is not supported; supported: {BITS}; {_INSTEAD}")
    return _read_awq(section) if method == "awq" else _read_gptq(section)


def packed_stem(name: str, names: Container[str]) -> str | None:
    """Return `layer` for the tensor `layer.weight` if the checkpoint has it as 4-bit codes, `layer.qweight`."""
    stem = name.removesuffix(_WEIGHT)
    return stem if stem != name and f"{stem}.qweight" in names else None


def _read_awq(section: ConfigReader) -> PackedFormat:
    version = section.text("version", "gemm")
    if version.lower() != "gemm":
        raise ConfigError(
            f"{section.origin}: version {abbreviate(version)} is not supported; supported: gemm; save the model with "
            f"version='GEMM', or {_INSTEAD}"
        )
    return PackedFormat("awq", _group(section), symmetric=not section.flag("zero_point", True))


def _read_gptq(section: ConfigReader) -> PackedFormat:
    key = "checkpoint_format" if section.has("checkpoint_format") else "format"
    stored = section.text(key, "gptq")
    if section.flag("is_marlin_format", False):
        key, stored = "is_marlin_format", "marlin"
    if stored not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"{section.origin}: {key} says {abbreviate(stored)}, which is not supported; supported: gptq, gptq_v2; "
            f"save the model in one of them, or {_INSTEAD}"
        )
    group = _group(section)
    if section.flag("desc_act", False) and group is not None:
        raise ConfigError(
            f"{section.origin}: desc_act = True (groups in the order of activations) is not supported; quantise the "
            f"model with desc_act=False, or {_INSTEAD}"
        )
    if section.text("pack_dtype", "int32") != "int32":
        raise ConfigError(
            f"{section.origin}: pack_dtype {abbreviate(section.values['pack_dtype'])} is not supported; supported: "
            f"int32; {_INSTEAD}"
        )
    rules = section.section("dynamic")
    different = [name for name in (rules.values if rules else ()) if not name.startswith("-:")]
    if different:
        raise ConfigError(
            f"{section.origin}: dynamic has settings of its own for {abbreviate(different[0])}, which is not "
            f"supported, only modules left out ('-:'); {_INSTEAD}"
        )
    return PackedFormat("gptq", group, section.flag("sym", True), stored_zero=1 if stored == "gptq" else 0)


def _group(section: ConfigReader) -> int | None:
    if section.values.get("group_size") == -1:
        return None
    group = section.integer("group_size")
    if group % _LEAST_GROUP:
        raise ConfigError(
            f"{section.origin}: group_size = {group} is not supported; supported: -1 and multiples of {_LEAST_GROUP}; "
            f"{_INSTEAD}"
        )
    return group


def resolve_quantization(files: ModelFiles, quantization: str | None) -> str | None:
    """Return how weights are held, given the setting; None for floats of the compute dtype.

    "int8" and "fp8" are made while loading; "gguf", "awq" and "gptq" are the checkpoint's own codes, which it keeps
    without a setting too; "none" is floats. Raises ConfigError for other words, and for codes that are not there.
    """
    stored = packed_format(files)
    own = stored.method if stored else "gguf" if files.format == "gguf" else None
    if quantization is None:
        return own
    if quantization == "none":
        return None
    if quantization in MADE_WHILE_LOADING or quantization == own:
        return quantization
    if quantization == "gguf":
        raise ConfigError(f"quantization='gguf' needs a GGUF file, and {files.path} is not one; use 'int8'")
    if quantization in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={quantization!r} needs a checkpoint quantised by {quantization.upper()}, and "
            f"{files.path} is not one; leave the setting out"
        )
    raise ConfigError(
        f"quantization={quantization!r} is not supported; take 'int8' or 'fp8' (8 bits, made while loading), "
        "'gguf', 'awq' or 'gptq' (the codes of such a checkpoint as they are), 'none' (floats), or leave it out"
    )
