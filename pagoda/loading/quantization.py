"""How weights are stored and held: the settings of quantised checkpoints, and `resolve_quantization`. No torch."""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from pagoda.base.abbreviate import abbreviate
from pagoda.base.dtypes import QUANTIZATIONS
from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.forms import MXFP4, ONLINE_FORMS, Q4, Q4_ZERO, Q8, Q8_ZERO, WeightFormat
from pagoda.loading.model_files import ModelFiles, read_json_object
from pagoda.models.config_reader import ConfigReader

_WORD_BITS = 32
LEAST_GROUP = 32
"""Of which all groups are multiples."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""What the names of the two tensors of a stack of matrices in MXFP4 end in."""
_WEIGHT = ".weight"
_INSTEAD = "use another quantisation of the model, its bf16 weights (quantization='int8' halves them), or a GGUF"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of a quantised matrix are, and what their dimensions are.

    codes, scales, zeros, order: what the names end in, after that of the layer; zeros and order may be absent.
    transposed: the dimensions are [in, out], else [out, in].   words_along_out, words_along_in: words of several codes
    are along that dimension; zero points are in words along `out` if codes are in words.
    """

    codes: str
    scales: str
    zeros: str
    order: str = ""
    transposed: bool = False
    words_along_out: bool = False
    words_along_in: bool = False

    @property
    def marker(self) -> str:
        """Return what only the quantised layers have."""
        return self.scales if self.codes == "weight" else self.codes

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.codes, self.scales, self.zeros, self.order, "weight_shape")


AWQ = Layout("qweight", "scales", "qzeros", transposed=True, words_along_out=True)
GPTQ = Layout("qweight", "scales", "qzeros", "g_idx", transposed=True, words_along_in=True)
PACKED = Layout("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", words_along_in=True)
BYTES = Layout("weight", "weight_scale", "weight_zero_point")
"""Signed bytes, or 8-bit floats, in place of the matrix of floats."""
INVERSE = Layout("weight", "weight_scale_inv", "")
STACKED = Layout(MXFP4_BLOCKS, MXFP4_SCALES, "")
"""The experts of a layer in MXFP4 (loading/mxfp4.py): these ends follow their name without a dot."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the quantised matrices of a checkpoint are stored; those that are not quantised are stored as floats.

    bits: of a code; 0 for 8-bit floats (e4m3), which become floats of the compute dtype while loading.
    group: elements along a row that share a scale and a zero point, None for all of the row.
    symmetric: all zero points are the middle of the codes, 8 or 128.   stored_zero: what a stored zero point lacks, 1
    in GPTQ's first format.   ordered: groups are in the order of activations.
    block: (rows, columns) that share a scale, of 8-bit floats; None: rows, or the whole matrix.
    """

    method: str
    layout: Layout
    group: int | None
    symmetric: bool
    bits: int = 4
    stored_zero: int = 0
    ordered: bool = False
    block: tuple[int, int] | None = None

    @property
    def has_codes(self) -> bool:
        """Return whether there are codes that kernels multiply."""
        return self.bits > 0

    @property
    def codes_per_word(self) -> int:
        return _WORD_BITS // self.bits if self.layout.words_along_out or self.layout.words_along_in else 1

    @property
    def held_as(self) -> WeightFormat:
        """Return the form of its codes in memory; elements that share a scale are `group`, or a part of it."""
        if self.layout is STACKED:
            return WeightFormat(MXFP4, LEAST_GROUP)
        group = next(size for size in (128, 64, 32) if self.group is None or self.group % size == 0)
        forms = {4: (Q4_ZERO, Q4), 8: (Q8_ZERO, Q8)}[self.bits]
        return WeightFormat(forms[self.symmetric], LEAST_GROUP if self.ordered else group)

    def stem(self, name: str, names: Container[str]) -> str | None:
        """Return `layer` for the tensor `layer.weight` if the checkpoint, which has `names`, has it quantised.

        Of stacked experts it is the name itself.
        """
        if self.layout is STACKED:
            return name if name + self.layout.codes in names else None
        return packed_stem(name, names, self.layout.marker)


def packed_format(files: ModelFiles) -> PackedFormat | None:
    """Return the format of a checkpoint's quantised weights, or None. Raises ConfigError as `read_format`."""
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
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise _unsupported(section, "quant_method", method, ", ".join(_METHODS))
    return read(section)


def packed_stem(name: str, names: Container[str], marker: str = "qweight") -> str | None:
    """Return `layer` for the tensor `layer.weight` if there is `layer.marker` too."""
    stem = name.removesuffix(_WEIGHT)
    return stem if stem != name and f"{stem}.{marker}" in names else None


def _unsupported(
    section: ConfigReader, key: str, value: object, supported: str, instead: str = _INSTEAD
) -> ConfigError:
    return ConfigError(
        f"{section.origin}: {key} {abbreviate(value)} is not supported; supported: {supported}; {instead}"
    )


def _read_awq(section: ConfigReader) -> PackedFormat:
    _bits(section, "bits", (4,))
    version = section.text("version", "gemm")
    if version.lower() != "gemm":
        raise _unsupported(section, "version", version, "gemm", f"save the model with version='GEMM', or {_INSTEAD}")
    return PackedFormat("awq", AWQ, _group(section), symmetric=not section.flag("zero_point", True))


def _read_gptq(section: ConfigReader) -> PackedFormat:
    bits = _bits(section, "bits")
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
    if section.text("pack_dtype", "int32") != "int32":
        raise _unsupported(section, "pack_dtype", section.values["pack_dtype"], "int32")
    rules = section.section("dynamic")
    different = [name for name in (rules.values if rules else ()) if not name.startswith("-:")]
    if different:
        raise ConfigError(
            f"{section.origin}: dynamic has settings of its own for {abbreviate(different[0])}, which is not "
            f"supported, only modules left out ('-:'); {_INSTEAD}"
        )
    ordered = section.flag("desc_act", False) and group is not None  # within one group, the order has no effect
    zero = 1 if stored == "gptq" else 0
    return PackedFormat("gptq", GPTQ, group, section.flag("sym", True), bits, zero, ordered)


def _read_compressed_tensors(section: ConfigReader) -> PackedFormat:
    """Read what llm-compressor writes: the schemes of groups of layers, which must be of one kind."""
    stored = section.text("format")
    if stored not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        supported = "pack-quantized, int-quantized, float-quantized, naive-quantized"
        raise _unsupported(section, "format", stored, supported)
    for key in ("sparsity_config", "transform_config"):
        found = section.values.get(key)
        if found and not (isinstance(found, dict) and found.get("format") == "dense"):
            raise _unsupported(section, key, section.values[key], "none")
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise ConfigError(f"{section.origin}: 'config_groups' is missing; it should say how the weights are quantised")
    found = {_read_scheme(groups, name, stored) for name in groups.values}
    if len(found) > 1:
        raise ConfigError(
            f"{groups.origin}: {len(found)} ways to quantise weights in one model are not supported, only one; "
            f"{_INSTEAD}"
        )
    return found.pop()


def _read_scheme(groups: ConfigReader, name: str, stored: str) -> PackedFormat:
    scheme = groups.section(name)
    weights = scheme.section("weights") if scheme else None
    if scheme is None or weights is None:
        raise ConfigError(f"{groups.origin}: {name} has no 'weights', which say how they are quantised; {_INSTEAD}")
    kind, strategy = weights.text("type", "int"), weights.text("strategy", "tensor")
    if weights.values.get("dynamic"):
        raise _unsupported(weights, "dynamic", weights.values["dynamic"], "false")
    if kind == "float":
        _bits(weights, "num_bits", (8,))
        if strategy not in ("tensor", "channel", "block"):
            raise _unsupported(weights, "strategy", strategy, "tensor, channel, block")
        block = _block(weights, "block_structure") if strategy == "block" else None
        return PackedFormat("compressed-tensors", BYTES, None, True, 0, block=block)
    if kind != "int":
        raise _unsupported(weights, "type", kind, "int, float")
    is_packed = stored == "pack-quantized"
    bits = _bits(weights, "num_bits", (4, 8) if is_packed else (8,))
    if strategy not in ("tensor", "channel", "group"):
        raise _unsupported(weights, "strategy", strategy, "tensor, channel, group")
    group = _group(weights) if strategy == "group" else None
    order = weights.values.get("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise _unsupported(weights, "actorder", order, "null, weight, static, group, dynamic")
    ordered = order in ("group", "dynamic") and group is not None
    layout = PACKED if is_packed else BYTES
    return PackedFormat("compressed-tensors", layout, group, weights.flag("symmetric", True), bits, ordered=ordered)


def _read_fp8(section: ConfigReader) -> PackedFormat:
    """Read what DeepSeek and Qwen write: 8-bit floats in blocks."""
    if (kind := section.text("fmt", "e4m3")) != "e4m3":
        raise _unsupported(section, "fmt", kind, "e4m3")
    if not section.has("weight_block_size"):
        return PackedFormat("fp8", BYTES, None, True, 0)
    return PackedFormat("fp8", INVERSE, None, True, 0, block=_block(section, "weight_block_size"))


def _read_mxfp4(section: ConfigReader) -> PackedFormat:
    return PackedFormat("mxfp4", STACKED, LEAST_GROUP, True)


_METHODS = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}


def _bits(section: ConfigReader, key: str, supported: tuple[int, ...] = (4, 8)) -> int:
    bits = section.integer(key)
    if bits not in supported:
        raise _unsupported(section, f"{key} =", bits, ", ".join(map(str, supported)))
    return bits


def _group(section: ConfigReader) -> int | None:
    if section.values.get("group_size") == -1:
        return None
    group = section.integer("group_size")
    if group % LEAST_GROUP:
        raise _unsupported(section, "group_size =", group, f"-1 and multiples of {LEAST_GROUP}")
    return group


def _block(section: ConfigReader, key: str) -> tuple[int, int]:
    found = section.values.get(key)
    if not isinstance(found, list) or len(found) != 2:
        raise section.wrong(key, "two positive integers")
    sizes: Mapping[str, object] = {f"{key}[{index}]": size for index, size in enumerate(found)}
    rows, columns = (ConfigReader(sizes, section.origin).integer(name) for name in sizes)
    return rows, columns


def resolve_quantization(files: ModelFiles, quantization: str | None) -> str | None:
    """Return how weights are held, given the setting; None for floats of the compute dtype.

    "int8" and "fp8" are made while loading; "gguf", "awq", "gptq", "compressed-tensors" and "mxfp4" are the
    checkpoint's own codes, which it keeps without a setting too; "none" is floats. Raises ConfigError for other words,
    and for codes that are not there.
    """
    stored = packed_format(files)
    own = "gguf" if files.format == "gguf" else stored.method if stored and stored.has_codes else None
    if quantization is None:
        return own
    if quantization == "none":
        return None
    if quantization in ONLINE_FORMS or quantization == own:
        return quantization
    if quantization == "gguf":
        raise ConfigError(f"quantization='gguf' needs a GGUF file, and {files.path} is not one; use 'int8'")
    if quantization in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={quantization!r} needs a checkpoint quantised by {quantization.upper()}, and "
            f"{files.path} is not one; leave the setting out"
        )
    raise ConfigError(
        f"quantization={quantization!r} is not supported; take 'int8' or 'fp8' (8 bits, made while loading), 'gguf', "
        "'awq', 'gptq', 'compressed-tensors' or 'mxfp4' (the codes of such a checkpoint as they are), 'none' (floats), "
        "or leave it out"
    )
