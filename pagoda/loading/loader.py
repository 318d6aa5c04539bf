"""load_model: a checkpoint's files to a Model that runs on given kernels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import QuantizedWeight, quantize
from pagoda.kernels.ops import Ops
from pagoda.layers.attention import Attention
from pagoda.layers.mlp import GatedMLP
from pagoda.layers.rotary import RotaryTable, build_rotary_table
from pagoda.loading.gguf_codes import stack_codes
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.weights import Weights, open_weights
from pagoda.models.architecture import ArchConfig, Architecture, CheckpointKeys
from pagoda.models.base import Model
from pagoda.models.decoder import Decoder, DecoderLayer
from pagoda.ops.tensor import LinearWeight

_ROPE_FACTORS = "rope_freqs.weight"  # llama.cpp's place for Llama 3's rope scaling


def load_model(
    files: ModelFiles,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    num_positions: int | None = None,
) -> Model:
    """Load a model's weights in `dtype` onto `device`, prepared for `ops`.

    Weights go from the mapped file straight into the tensors that `ops.prepare_linear` is given; one layer's at a time
    is held twice at most. num_positions: how many positions `forward` may be given, None for the model's own limit.
    Raises ConfigError for what is unsupported, missing, of a wrong shape, truncated or corrupt, and names it.
    """
    if quantization not in (None, "int8", "gguf"):
        raise ConfigError(
            f"quantization={quantization!r} is not supported; take 'int8' (8 bits, made while loading), 'gguf' (the "
            "codes of a GGUF as they are), or leave it out"
        )
    if quantization == "gguf" and files.format != "gguf":
        raise ConfigError(f"quantization='gguf' needs a GGUF file, and {files.path} is none; take 'int8'")
    architecture, config = read_architecture(files)
    weights = open_weights(files)
    builder = _Builder(weights, _choose_keys(architecture, files, weights), config, ops, dtype, device, quantization)
    with _one_torch_thread():
        return builder.build(num_positions or config.spec.max_position)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Loading is thousands of small torch ops that wait for memory. A second thread gains nothing, and where others use
    the cores too, each op's barrier waits for a thread that does not run: 0.4 s became 30 on a machine with load 10.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _choose_keys(architecture: Architecture, files: ModelFiles, weights: Weights) -> CheckpointKeys:
    if files.format == "gguf":
        return architecture.gguf_keys
    for keys in architecture.hf_keys:
        if f"{keys.embedding}.weight" in weights:
            return keys
    tried = ", ".join(f"{keys.embedding}.weight" for keys in architecture.hf_keys)
    raise ConfigError(f"{files.path}: no {architecture.name} weights: none of these tensors is there: {tried}")


class _Builder:
    """Reads tensors by the architecture's keys, checks shapes, and stacks the parts of fused layers in place."""

    def __init__(
        self,
        weights: Weights,
        keys: CheckpointKeys,
        config: ArchConfig,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None,
    ) -> None:
        self.weights, self.keys, self.config, self.spec = weights, keys, config, config.spec
        self.ops, self.dtype, self.device, self.quantization = ops, dtype, device, quantization

    def build(self, num_positions: int) -> Decoder:
        spec, keys = self.spec, self.keys
        embedding = self.tensor(f"{keys.embedding}.weight", (spec.vocab_size, spec.hidden_size))
        full, windowed = self.rotary_tables(num_positions)
        layers = [
            self.layer(index, windowed if window else full, window) for index, window in enumerate(spec.layer_windows)
        ]
        final_norm = self.norm(keys.final_norm, spec.hidden_size)
        lm_head_key = keys.embedding if spec.tie_embeddings else keys.lm_head
        # Tied: made from the embedding in memory, unless the codes it is stored in are wanted.
        table = embedding if spec.tie_embeddings else None
        lm_head = self.linear("", (lm_head_key,), (spec.vocab_size,), spec.hidden_size, weight=table)
        return Decoder(self.config, embedding, layers, final_norm, lm_head)

    def rotary_tables(self, num_positions: int) -> tuple[RotaryTable, RotaryTable]:
        head_dim = self.spec.head_dim
        factors = None
        if _ROPE_FACTORS in self.weights:
            factors = self.tensor(_ROPE_FACTORS, (head_dim // 2,), torch.float32).cpu()
        config = self.config
        full = build_rotary_table(config.rope_full, head_dim, num_positions, self.device, factors)
        if config.rope_window == config.rope_full:
            return full, full
        return full, build_rotary_table(config.rope_window, head_dim, num_positions, self.device)

    def layer(self, index: int, rotary: RotaryTable, window: int) -> DecoderLayer:
        spec, config, names = self.spec, self.config, self.keys.layer
        prefix = self.keys.layer_prefix.format(layer=index)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        inner, hidden = spec.intermediate_size, spec.hidden_size

        def norm(name: str | None, size: int = hidden) -> torch.Tensor | None:
            return self.norm(prefix + name, size) if name is not None else None

        attention = Attention(
            qkv=self.qkv(prefix, names.qkv, (q_size, kv_size, kv_size), hidden),
            out=self.linear(prefix, names.attention_out, (hidden,), q_size, config.attention_out_bias),
            q_norm=norm(names.q_norm, spec.head_dim),
            k_norm=norm(names.k_norm, spec.head_dim),
            rotary=rotary,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=config.attention_scale,
            window=window,
            softcap=config.attention_softcap,
            norm_eps=config.rms_norm_eps,
            unit_offset_norms=config.unit_offset_norms,
        )
        mlp = GatedMLP(
            gate_up=self.linear(prefix, names.gate_up, (inner, inner), hidden, config.mlp_bias),
            down=self.linear(prefix, names.down, (hidden,), inner, config.mlp_bias),
            activation=config.activation,
        )
        return DecoderLayer(
            attention_norm=self.norm(prefix + names.attention_norm, hidden),
            attention=attention,
            post_attention_norm=norm(names.post_attention_norm),
            mlp_norm=self.norm(prefix + names.mlp_norm, hidden),
            mlp=mlp,
            post_mlp_norm=norm(names.post_mlp_norm),
        )

    def qkv(self, prefix: str, parts: Sequence[str], rows: tuple[int, int, int], in_features: int) -> LinearWeight:
        """The fused q, k, v; in the checkpoint's row order until here."""
        bias = self.stacked(prefix, parts, "bias", rows) if self.config.qkv_bias else None
        num_qk = rows[0] + rows[1]
        self.undo_interleaving(bias, num_qk)
        codes = self.stacked_codes(prefix, parts, rows, in_features)
        if codes is not None:
            for tensor in (codes.codes, codes.scales, codes.minima):
                self.undo_interleaving(tensor, num_qk)
            return self.ops.prepare_quantized_linear(codes, self.dtype, bias)
        weight = self.stacked(prefix, parts, "weight", rows, (in_features,))
        self.undo_interleaving(weight, num_qk)
        return self.prepared(weight, bias)

    def linear(
        self,
        prefix: str,
        parts: Sequence[str],
        rows: tuple[int, ...],
        in_features: int,
        has_bias: bool = False,
        weight: torch.Tensor | None = None,
    ) -> LinearWeight:
        """A linear layer of parts stacked along the output dimension. weight: their values, where they are at hand."""
        bias = self.stacked(prefix, parts, "bias", rows) if has_bias else None
        codes = self.stacked_codes(prefix, parts, rows, in_features)
        if codes is not None:
            return self.ops.prepare_quantized_linear(codes, self.dtype, bias)
        if weight is None:
            weight = self.stacked(prefix, parts, "weight", rows, (in_features,))
        return self.prepared(weight, bias)

    def prepared(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
        if self.quantization == "int8":
            return self.ops.prepare_quantized_linear(quantize(weight), self.dtype, bias)
        return self.ops.prepare_linear(weight, bias)

    def stacked_codes(
        self, prefix: str, parts: Sequence[str], rows: tuple[int, ...], in_features: int
    ) -> QuantizedWeight | None:
        """Stacked weights as the codes they are stored in; None where floats are stored or codes are not wanted."""
        if self.quantization != "gguf":
            return None
        names = [f"{prefix}{part}.weight" for part in parts]
        for name, size in zip(names, rows if len(parts) == len(rows) else (sum(rows),), strict=True):
            self.check_shape(name, (size, in_features))
        found = [self.weights.read_codes(name) for name in names]
        codes = [part for part in found if part is not None]
        return stack_codes(codes) if len(codes) == len(names) else None

    def stacked(
        self, prefix: str, parts: Sequence[str], suffix: str, rows: tuple[int, ...], columns: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Parts one below the other. rows: their sizes; a single part holds them all, fused already."""
        sizes = rows if len(parts) == len(rows) else (sum(rows),)
        names = [f"{prefix}{part}.{suffix}" for part in parts]
        for name, size in zip(names, sizes, strict=True):
            self.check_shape(name, (size, *columns))
        out = torch.empty(sum(rows), *columns, dtype=self.dtype, device=self.device)
        for name, part in zip(names, out.split(sizes), strict=True):
            self.weights.read_into(name, part)
        return out

    def undo_interleaving(self, tensor: torch.Tensor | None, num_rows: int) -> None:
        """Put llama.cpp's first `num_rows` rows (pairs side by side) back into halves, in place; heads are independent.

        Nothing to do where the checkpoint does not interleave, or has no such tensor.
        """
        if tensor is None or not self.keys.interleaved_qk:
            return
        qk = tensor[:num_rows]
        pairs = qk.view(-1, self.spec.head_dim // 2, 2, *qk.shape[1:])
        qk.copy_(pairs.transpose(1, 2).reshape(qk.shape))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor in `dtype` (None: compute dtype)."""
        self.check_shape(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.weights.read_into(name, out)
        return out

    def norm(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight [size] in compute dtype, without the 1 of a unit offset."""
        out = self.tensor(f"{name}.weight", (size,), torch.float32)
        if self.config.unit_offset_norms and self.keys.norms_plus_one:
            out -= 1.0  # in float32: 1 + weight has lost nothing yet
        return out.to(self.dtype)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Before anything of that size is allocated."""
        found = self.weights.shape(name)
        if found != shape:
            raise ConfigError(f"tensor {name!r} has the shape {found}, the model's settings ask for {shape}")
