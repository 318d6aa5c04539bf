"""What encoder-decoder models share: encoders of text, the parts of layers, and how both stacks' shapes are read."""

from collections.abc import Sequence

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.core.request import MediaItem
from pagoda.layers.attention import Attention, CrossAttention, Heads
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.layers.norm import LayerNorm
from pagoda.layers.parameter import Axis
from pagoda.models.base import Encoder, EncoderItem, ItemArray
from pagoda.models.config_reader import ConfigReader
from pagoda.ops.declare import Activation

NORM_EPS = 1e-5
SOURCE_TOKENS = "source_tokens"
"""Input of the batches of an encoder of text: int32 [tokens]."""

_MOST_LAYERS = 512


class TextEncoder(Encoder):
    """An encoder of texts: token ids, as features [tokens, 1], to states. Its batches have them as SOURCE_TOKENS."""

    reads_text = True

    def __init__(self, spec: ModelSpec, start: tuple[int, ...]) -> None:
        """spec: its `max_position` is the longest text.   start: of an answer."""
        self.spec, self.start = spec, start
        self.output_size = spec.hidden_size

    def largest_item(self) -> MediaItem:
        return MediaItem("", 0, self.spec.max_position, np.zeros((self.spec.max_position, 1), np.float32))

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        most = self.spec.max_position
        if len(shape) != 2 or shape[1] != 1 or not 1 <= shape[0] <= most or grid:
            raise RequestError(f"the encoder reads a text of 1 to {most} tokens, not {tuple(shape)}", "prompt")
        return shape[0]

    def check_values(self, features: np.ndarray) -> None:
        ids, vocab_size = features.astype(np.int64), self.spec.vocab_size
        if (ids != features).any() or ids.min() < 0 or ids.max() >= vocab_size:
            raise RequestError(f"the encoder reads token ids of 0 .. {vocab_size - 1}", "prompt")

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        ids = features[:, 0].astype(np.int32)
        return EncoderItem((np.array([len(ids)], np.int32),), len(ids), {SOURCE_TOKENS: ItemArray(ids)})


def read_start(config: ConfigReader) -> tuple[int, ...]:
    """Return the token with which an answer begins. Raises ConfigError if it is not set."""
    start = config.ids("decoder_start_token_id")
    if not start:
        raise config.wrong("decoder_start_token_id", "a token id")
    return start


class StackLayer(Module):
    """Attention, in a decoder also to the encoder, and a feed-forward layer, each with a norm."""

    def __init__(self, spec: ModelSpec, activation: Activation, states_size: int, k_bias: bool) -> None:
        """states_size: elements of what a decoder attends to; 0: of an encoder.   k_bias: see Attention."""
        size, heads = spec.hidden_size, Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        is_decoder = states_size > 0
        self.self_attn_layer_norm = LayerNorm(size, NORM_EPS)
        self.self_attn = Attention(
            size, heads, None, causal=is_decoder, qkv_bias=True, k_bias=k_bias, out_bias=True, out="out_proj"
        )
        self.encoder_attn_layer_norm: LayerNorm | None = None
        self.encoder_attn: CrossAttention | None = None
        if is_decoder:
            self.encoder_attn_layer_norm = LayerNorm(size, NORM_EPS)
            self.encoder_attn = CrossAttention(size, heads, states_size, k_bias=k_bias, out="out_proj")
        self.final_layer_norm = LayerNorm(size, NORM_EPS)
        self.fc1 = Linear(size, spec.intermediate_size, bias=True, shard=Axis.OUT)
        self.fc2 = Linear(spec.intermediate_size, size, bias=True, shard=Axis.IN)
        self.activation = activation


def read_stack(config: ConfigReader, architecture: str, stack: str, max_position: int) -> ModelSpec:
    """Return the shapes of the "encoder" or the "decoder". Raises ConfigError."""
    hidden_size, num_heads = config.integer("d_model"), config.integer(f"{stack}_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(f"{config.origin}: d_model = {hidden_size} is not a multiple of its {num_heads} heads")
    num_layers = config.integer(f"{stack}_layers", most=_MOST_LAYERS)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer(f"{stack}_ffn_dim"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=max_position,
        layer_windows=(0,) * num_layers,
        eos_token_ids=config.ids("eos_token_id"),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        tie_embeddings=True,
        torch_dtype=config.text("dtype", config.text("torch_dtype", "float32")),
    )
