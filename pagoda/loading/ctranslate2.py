"""CTranslate2 files of Whisper models: the parameters of `model.bin`, by transformers' names. No torch."""

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.loading.mapped_file import map_file
from pagoda.loading.model_files import read_json_object

FILE = "model.bin"
END_TOKEN = "<|endoftext|>"
_SPEC = "WhisperSpec"
_VERSION = 6
_DTYPES: Mapping[int, str] = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}
_NUMPY = {"bfloat16": "<u2"}
_GELU = 3  # of CTranslate2's activations

# CTranslate2's modules -> transformers'. Several have their rows in one tensor, one after the other.
_MODULES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("conv1", "conv2", "layer_norm")},
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_PARAMETERS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}
_PATH = re.compile(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)")


@dataclass(frozen=True, slots=True)
class Variable:
    """One tensor of the file.   begin: of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A parameter: rows of a variable."""

    variable: str
    rows: range
    shape: tuple[int, ...]


class CTranslate2File:
    """A memory-mapped `model.bin`.

    variables: by CTranslate2's names.   parameters: by the names that transformers gives them.
    """

    def __init__(self, folder: Path) -> None:
        """Read the names and shapes. Raises ConfigError for a file that is corrupt or of another model."""
        self.path = folder / FILE
        try:
            self._data = map_file(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from None
        try:
            self.variables = self._read_variables()
        except (struct.error, UnicodeDecodeError):
            raise ConfigError(f"{self.path}: truncated or corrupt") from None
        self.parameters: dict[str, StoredRows] = {}
        for name, variable in self.variables.items():
            self._add_parameters(name, variable)

    def _read_variables(self) -> dict[str, Variable]:
        at = 0

        def take(form: str) -> int:
            nonlocal at
            (value,) = struct.unpack_from(f"<{form}", self._data, at)
            at += struct.calcsize(form)
            return value

        def take_text() -> str:
            nonlocal at
            size = take("H")
            text = self._data[at : at + size].rstrip(b"\0").decode()
            at += size
            return text

        version, spec, _ = take("I"), take_text(), take("I")
        if version != _VERSION or spec != _SPEC:
            raise ConfigError(
                f"{self.path}: {abbreviate(spec)} in version {version} of CTranslate2's format; pagoda reads {_SPEC} "
                f"in version {_VERSION}"
            )
        found: dict[str, Variable] = {}
        for _ in range(take("I")):
            name = take_text()
            shape = tuple(take("I") for _ in range(take("B")))
            dtype, num_bytes = _DTYPES.get(take("B"), "unknown"), take("I")
            found[name] = Variable(dtype, shape, at, num_bytes)
            at += num_bytes
        if at > len(self._data):
            raise ConfigError(f"{self.path}: truncated or corrupt")
        return found

    def _add_parameters(self, name: str, variable: Variable) -> None:
        match = _PATH.fullmatch(name)
        if match is None or match[3] not in _MODULES or match[4] not in _PARAMETERS or not variable.shape:
            return  # a setting, or the scale of a weight
        stack, layer, modules, suffix = match[1], match[2], _MODULES[match[3]], _PARAMETERS[match[4]]
        prefix = f"model.{stack}." + (f"layers.{layer}." if layer is not None else "")
        size = variable.shape[0] // len(modules)
        for number, module in enumerate(modules):
            if module.endswith("k_proj") and suffix == "bias":
                continue  # zeros: transformers has none
            rows = range(number * size, (number + 1) * size)
            self.parameters[f"{prefix}{module}.{suffix}"] = StoredRows(name, rows, (size, *variable.shape[1:]))

    def read(self, name: str) -> np.ndarray:
        """Return a parameter: float32 or float16, a view of the file where it is stored so. Raises ConfigError."""
        found = self.parameters[name]
        rows = slice(found.rows.start, found.rows.stop)
        values, dtype = self._array(found.variable)[rows], self.variables[found.variable].dtype
        if dtype == "bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        if dtype in ("float32", "float16"):
            return values
        scale_name = f"{found.variable}_scale"
        if dtype not in ("int8", "int16") or scale_name not in self.variables:
            raise ConfigError(f"{self.path}: {found.variable} is {dtype}, which is not supported as a weight")
        scale = self._array(scale_name)
        if scale.ndim:  # one per row
            scale = scale[rows].reshape(-1, *[1] * (values.ndim - 1))
        return values.astype(np.float32) / scale

    def _array(self, name: str) -> np.ndarray:
        found = self.variables[name]
        if found.dtype not in _DTYPES.values():
            raise ConfigError(f"{self.path}: {name} is of an unknown type")
        dtype, count = np.dtype(_NUMPY.get(found.dtype, found.dtype)), math.prod(found.shape)
        if count * dtype.itemsize != found.num_bytes:
            raise ConfigError(f"{self.path}: {name} has {found.num_bytes} bytes, {found.shape} asks for others")
        return np.frombuffer(self._data, dtype, count, found.begin).reshape(found.shape)

    def _integer(self, name: str) -> int:
        values = self._array(name)
        if values.size != 1 or values.dtype.kind != "i":
            raise ConfigError(f"{self.path}: {name} is not an integer")
        return int(values.item())

    def settings(self) -> dict[str, object]:
        """Return the model's settings with the names of a config.json of transformers. Raises ConfigError."""
        for name, wanted in (("decoder/pre_norm", 1), ("decoder/activation", _GELU), ("decoder/scale_embeddings", 0)):
            if name in self.variables and (stated := self._integer(name)) != wanted:
                raise ConfigError(f"{self.path}: {name} = {stated} is not supported")
        try:
            hidden, num_mels, _ = self.variables["encoder/conv1/weight"].shape
            vocab_size, _ = self.variables["decoder/embeddings/weight"].shape
            positions = {stack: self.variables[f"{stack}/position_encodings/encodings"].shape[0] for stack in _STACKS}
            heads = {stack: self._integer(f"{stack}/num_heads") for stack in _STACKS}
            ffn = {stack: self.variables[f"{stack}/layer_0/ffn/linear_0/weight"].shape[0] for stack in _STACKS}
        except (LookupError, ValueError) as error:
            raise ConfigError(f"{self.path}: not a Whisper model: {error}") from None
        layers = Counter(
            match[1] for name in self.variables if (match := re.fullmatch(r"(\w+)/layer_\d+/ffn/linear_0/weight", name))
        )
        found: dict[str, object] = {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": hidden,
            "num_mel_bins": num_mels,
            "vocab_size": vocab_size,
            "max_source_positions": positions["encoder"],
            "max_target_positions": positions["decoder"],
            "activation_function": "gelu",
            "torch_dtype": "float32",  # of the arithmetic: what CTranslate2 takes on a CPU, too
        }
        for stack in _STACKS:
            found[f"{stack}_layers"] = layers[stack]
            found[f"{stack}_attention_heads"] = heads[stack]
            found[f"{stack}_ffn_dim"] = ffn[stack]
        return found


_STACKS = ("encoder", "decoder")


def token_settings(folder: Path) -> dict[str, object]:
    """Return what `config.json` next to a model says, with the names of a generation_config.json."""
    path = folder / "config.json"
    values = read_json_object(path) if path.is_file() else {}
    names = {
        "suppress_tokens": "suppress_ids",
        "begin_suppress_tokens": "suppress_ids_begin",
        "alignment_heads": "alignment_heads",
    }
    return {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
