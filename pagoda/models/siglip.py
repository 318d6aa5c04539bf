"""SigLIP: square patches with learned positions, attention both ways, norms before each sum; Idefics3's and Gemma 3's.

A patch embedding is a convolution whose windows do not overlap: a linear layer of flattened patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.core.request import MediaItem
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.linear import Embedding, Linear
from pagoda.layers.mlp import PlainMLP
from pagoda.layers.module import Module
from pagoda.layers.norm import LayerNorm
from pagoda.models.base import FEATURES, Encoder, EncoderItem, ItemArray
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import read_activation
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.declare import Activation, Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

JOINED = "joined_patches"
"""Input of a tower's batch: int64 [outputs, n], the tokens of which an output is made."""

_CHANNELS = 3
_MOST_PATCHES = 1024  # along one side


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """patch_size: pixels of one side of a patch.   side: patches along one side of an image."""

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    side: int
    norm_eps: float
    activation: Activation

    @property
    def patch_values(self) -> int:
        """Numbers of one flattened patch."""
        return _CHANNELS * self.patch_size**2


def read_siglip(config: ConfigReader) -> SiglipConfig:
    """Read a `vision_config`, whose absent settings are those of Idefics3 in transformers. Raises ConfigError."""
    hidden_size, num_heads = config.integer("hidden_size", 1152), config.integer("num_attention_heads", 16)
    image_size, patch_size = config.integer("image_size", 224), config.integer("patch_size", 32)
    if hidden_size % num_heads:
        raise ConfigError(f"{config.origin}: hidden_size {hidden_size} does not divide by {num_heads} attention heads")
    if patch_size > image_size or image_size // patch_size > _MOST_PATCHES:
        raise ConfigError(
            f"{config.origin}: image_size {image_size} must be 1 to {_MOST_PATCHES} times patch_size {patch_size}"
        )
    if config.integer("num_channels", _CHANNELS) != _CHANNELS:
        raise config.wrong("num_channels", str(_CHANNELS))
    return SiglipConfig(
        hidden_size=hidden_size,
        inner_size=config.integer("intermediate_size", 3072),
        num_layers=config.integer("num_hidden_layers", 12, most=4096),
        num_heads=num_heads,
        patch_size=patch_size,
        side=image_size // patch_size,
        norm_eps=config.not_negative("layer_norm_eps", 1e-6),
        activation=read_activation(config, default="gelu_pytorch_tanh"),
    )


class SiglipEmbeddings(Module):
    """The sum of a patch's embedding and its position's."""

    def __init__(self, config: SiglipConfig) -> None:
        kernel = (_CHANNELS, config.patch_size, config.patch_size)
        self.patch_embedding = Linear(config.patch_values, config.hidden_size, True, kernel=kernel)
        self.position_embedding = Embedding(config.side**2, config.hidden_size, is_divided=False)

    def __call__(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        x = self.patch_embedding(ops, batch.inputs[FEATURES].tensor)
        return ops.add(x, self.position_embedding(ops, batch.positions))


class SiglipLayer(Module):
    def __init__(self, config: SiglipConfig) -> None:
        hidden = config.hidden_size
        heads = Heads(config.num_heads, config.num_heads, hidden // config.num_heads)
        self.layer_norm1 = LayerNorm(hidden, config.norm_eps)
        self.self_attn = Attention(hidden, heads, None, causal=False, qkv_bias=True, out_bias=True, out="out_proj")
        self.layer_norm2 = LayerNorm(hidden, config.norm_eps)
        self.mlp = PlainMLP(hidden, config.inner_size, config.activation, bias=True, names=("fc1", "fc2"))

    def __call__(
        self, ops: ForwardOps, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same."""
        x, residual = self.layer_norm1.add(ops, x, residual)
        x, residual = self.self_attn(ops, x, residual, batch, (), last=False)
        x, residual = self.layer_norm2.add(ops, x, residual)
        return self.mlp(ops, x), residual


class SiglipLayers(Module):
    def __init__(self, config: SiglipConfig) -> None:
        self.layers = [SiglipLayer(config) for _ in range(config.num_layers)]


class Siglip(Module):
    """Patches of images to their final states, normed. The batch's positions are rows of the table of positions."""

    def __init__(self, config: SiglipConfig) -> None:
        self.embeddings = SiglipEmbeddings(config)
        self.encoder = SiglipLayers(config)
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps)

    def __call__(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        """[num_patches, hidden]."""
        x, residual = self.embeddings(ops, batch), None
        for layer in self.encoder.layers:
            x, residual = layer(ops, x, residual, batch)
        return self.post_layernorm.add(ops, x, residual)[0]


class SiglipEncoder(Encoder):
    """Squares of one size to embeddings. A subclass says what an output is made of.

    An item is a tile or an image: features float32 [side * side, values of a patch], patches row by row; grid (side,
    side). A patch has its own place as its position. transformers looks Idefics3's up as a fraction of the tile, in
    float32, which for some sizes gives the place before; those of known checkpoints (26, 27, 32 and 70 patches) are not
    among them.
    """

    def __init__(self, vision: SiglipConfig, factor: int, spec: ModelSpec) -> None:
        """factor: patches of an output, in each direction.   spec: of the text model."""
        self.spec = spec
        self.output_size = spec.hidden_size
        self.tokens_per_output = factor**2
        self.vision, self.factor = vision, factor

    def largest_item(self) -> MediaItem:
        grid = (self.vision.side, self.vision.side)
        features = np.zeros((self.vision.side**2, self.vision.patch_values), np.float32)
        return MediaItem("", 0, self.num_outputs(features.shape, grid), features, grid)

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        side = self.vision.side
        wanted = (side**2, self.vision.patch_values)
        if tuple(shape) != wanted or grid != (side, side):
            raise RequestError(
                f"an item has features {wanted} and the grid {(side, side)}, not {tuple(shape)} and {grid}", "media"
            )
        return (side // self.factor) ** 2

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        side = self.vision.side
        joined = joined_patches(side, side, self.factor)
        inputs = {FEATURES: ItemArray(features), JOINED: ItemArray(joined, Domain.OUTPUTS, Domain.TOKENS)}
        return EncoderItem((np.array([side * side], np.int32),), len(joined), inputs)


def joined_patches(rows: int, columns: int, factor: int) -> np.ndarray:
    """Return the patches of each square of factor x factor, row by row; int64 [squares, factor ** 2]."""
    patches = np.arange(rows * columns, dtype=np.int64).reshape(rows // factor, factor, columns // factor, factor)
    return patches.transpose(0, 2, 1, 3).reshape(-1, factor * factor)
