"""T5: an encoder of text and a decoder that attends to what it gives, without positions but a bias by distance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.layers.attention import Attention, CrossAttention, Heads
from pagoda.layers.distance_bias import DistanceBias
from pagoda.layers.kv import place_kv
from pagoda.layers.linear import Embedding, LMHead
from pagoda.layers.mlp import GatedMLP, PlainMLP
from pagoda.layers.module import Module
from pagoda.layers.norm import RMSNorm
from pagoda.models.architecture import Architecture
from pagoda.models.base import Encoder, Model
from pagoda.models.config_reader import ConfigReader
from pagoda.models.encoder_decoder import SOURCE_TOKENS, TextEncoder, read_start
from pagoda.models.naming import Naming
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_MOST_LAYERS = 512
_MOST_DISTANCE = 1 << 16
_Q_K_V = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class T5Config:
    """spec, encoder: of the decoder and of the encoder.   start: of an answer.   gated: of the MLPs.

    num_buckets, max_distance: see DistanceBias.   is_tied: the head is the table of tokens, whose logits are scaled.
    """

    spec: ModelSpec
    encoder: ModelSpec
    start: tuple[int, ...]
    norm_eps: float
    activation: Activation
    gated: bool
    num_buckets: int
    max_distance: int
    is_tied: bool

    def distance_bias(self, both_ways: bool) -> DistanceBias:
        return DistanceBias(self.spec.num_heads, self.num_buckets, self.max_distance, both_ways)


class T5Block(Module):
    """Attention, in a decoder also to the encoder, and an MLP; each after a norm. x is added by the norm after it."""

    def __init__(self, config: T5Config, bias: DistanceBias, is_decoder: bool) -> None:
        spec, eps = config.spec, config.norm_eps
        size, heads = spec.hidden_size, Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.self_attn = Attention(size, heads, None, causal=is_decoder, scale=1.0, names=_Q_K_V, out="o")
        self.self_attn.distance_bias = bias
        self.self_attn_norm = RMSNorm(size, eps)
        self.encoder_attn: CrossAttention | None = None
        self.encoder_attn_norm: RMSNorm | None = None
        if is_decoder:
            self.encoder_attn = CrossAttention(size, heads, size, scale=1.0, bias=False, names=_Q_K_V, out="o")
            self.encoder_attn_norm = RMSNorm(size, eps)
        inner = spec.intermediate_size
        if config.gated:
            self.mlp = GatedMLP(size, inner, config.activation, names=("wi_0", "wi_1", "wo"))
        else:
            self.mlp = PlainMLP(size, inner, config.activation, names=("wi", "wo"))
        self.mlp_norm = RMSNorm(size, eps)

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same for the tokens that continue."""
        x, residual = self.self_attn_norm.add(ops, x, residual)
        x, residual = self.self_attn(ops, x, residual, batch, kv, last)
        if self.encoder_attn is not None and self.encoder_attn_norm is not None:
            x, residual = self.encoder_attn_norm.add(ops, x, residual)
            x = self.encoder_attn(ops, x, batch, kv, last)
        x, residual = self.mlp_norm.add(ops, x, residual)
        return self.mlp(ops, x), residual


class T5Stack(Module):
    """Blocks, which share a bias, and a norm."""

    def __init__(self, config: T5Config, is_decoder: bool) -> None:
        bias = config.distance_bias(both_ways=not is_decoder)
        num_layers = (config.spec if is_decoder else config.encoder).num_layers
        self.block = [T5Block(config, bias, is_decoder) for _ in range(num_layers)]
        self.final_layer_norm = RMSNorm(config.spec.hidden_size, config.norm_eps)
        self.cuts = is_decoder

    def __call__(self, ops: ForwardOps, x: Tensor, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """x [T, hidden] -> the same, normed: of a decoder, [num_outputs, hidden]."""
        residual: Tensor | None = None
        for block in self.block:
            x, residual = block(ops, x, residual, batch, kv, last=self.cuts and block is self.block[-1])
        return self.final_layer_norm.add(ops, x, residual)[0]


class T5Encoder(TextEncoder):
    def __init__(self, config: T5Config, shared: Embedding) -> None:
        super().__init__(config.encoder, config.start)
        self.embed_tokens = shared
        self.stack = T5Stack(config, is_decoder=False)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.stack(ops, self.embed_tokens(ops, batch.inputs[SOURCE_TOKENS].tensor), batch, kv)


class T5Model(Model):
    """Both stacks, and a head."""

    def __init__(self, config: T5Config) -> None:
        self.spec, size = config.spec, config.spec.hidden_size
        self.shared = Embedding(config.spec.vocab_size, size)
        self.encoder = T5Encoder(config, self.shared)
        self.decoder = T5Stack(config, is_decoder=True)
        tied = self.shared if config.is_tied else None
        self.lm_head = LMHead(size, config.spec.vocab_size, tied, scale=size**-0.5 if config.is_tied else 1.0)
        self.kv_groups = place_kv(self)

    @property
    def media_encoder(self) -> Encoder:
        return self.encoder

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        return self.decoder(ops, self.shared.of_batch(ops, batch), batch, kv)

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        return self.lm_head(ops, hidden)


_FEED_FORWARD = {
    "relu": (Activation.RELU, False),
    "gelu": (Activation.GELU, False),
    "gated-gelu": (Activation.GELU_TANH, True),
    "gated-silu": (Activation.SILU, True),
}
"""`feed_forward_proj` -> activation, and whether it is gated. transformers, too, takes "gated-gelu" for GELU's tanh."""


def read(config: ConfigReader) -> T5Config:
    """Read the settings. Raises ConfigError for what is not supported."""
    tied = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    return _read(config, "t5", tied)


def read_mt5(config: ConfigReader) -> T5Config:
    """Its checkpoints have a head of their own, whatever they say."""
    return _read(config, "mt5", is_tied=False)


def _read(config: ConfigReader, architecture: str, is_tied: bool) -> T5Config:
    config.expect("is_encoder_decoder", True)
    num_heads, num_layers = config.integer("num_heads"), config.integer("num_layers", most=_MOST_LAYERS)
    num_buckets = config.integer("relative_attention_num_buckets", 32)
    max_distance = config.integer("relative_attention_max_distance", 128, most=_MOST_DISTANCE)
    if num_buckets % 4 or num_buckets >= 2 * max_distance:
        raise ConfigError(
            f"{config.origin}: relative_attention_num_buckets = {num_buckets}, expected a multiple of 4 below twice "
            f"relative_attention_max_distance = {max_distance}"
        )
    form = config.choice("feed_forward_proj", tuple(_FEED_FORWARD), "relu" if architecture == "t5" else "gated-gelu")
    activation, gated = _FEED_FORWARD[form]
    decoder_layers = config.integer("num_decoder_layers", num_layers, most=_MOST_LAYERS)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("d_model"),
        intermediate_size=config.integer("d_ff"),
        num_layers=decoder_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=config.integer("d_kv"),
        # It reads texts of any length; it was trained on ones of 512 tokens.
        max_position=config.integer("n_positions", 512),
        layer_windows=(0,) * decoder_layers,
        eos_token_ids=config.ids("eos_token_id"),
        tie_embeddings=is_tied,
        torch_dtype=config.text("dtype", config.text("torch_dtype", "float32")),
    )
    return T5Config(
        spec=spec,
        encoder=replace(spec, num_layers=num_layers, layer_windows=(0,) * num_layers),
        start=read_start(config),
        norm_eps=config.not_negative("layer_norm_epsilon", 1e-6),
        activation=activation,
        gated=gated,
        num_buckets=num_buckets,
        max_distance=max_distance,
        is_tied=is_tied,
    )


_TENSORS = (
    (r"^encoder\.stack\.", "encoder."),
    (r"\.self_attn\.", ".layer.0.SelfAttention."),
    (r"\.self_attn_norm\.", ".layer.0.layer_norm."),
    (r"\.encoder_attn\.", ".layer.1.EncDecAttention."),
    (r"\.encoder_attn_norm\.", ".layer.1.layer_norm."),
    (r"^(encoder\..*)\.mlp\.", r"\1.layer.1.DenseReluDense."),
    (r"^(decoder\..*)\.mlp\.", r"\1.layer.2.DenseReluDense."),
    (r"^(encoder\..*)\.mlp_norm\.", r"\1.layer.1.layer_norm."),
    (r"^(decoder\..*)\.mlp_norm\.", r"\1.layer.2.layer_norm."),
    (r"\.distance_bias\.", ".relative_attention_bias."),
)
_HF = (Naming(substitutions=_TENSORS),)

T5 = Architecture(name="t5", title="T5", hf_names=("T5ForConditionalGeneration",), model=T5Model, read=read, hf=_HF)
MT5 = Architecture(
    name="mt5", title="mT5", hf_names=("MT5ForConditionalGeneration",), model=T5Model, read=read_mt5, hf=_HF
)
