"""Pixtral, the tower of Mistral Small 3.1, Ministral 3 and Mistral 4: images of any size, whose patches attend to their
whole image. Half of a head's pairs are turned by a patch's row and half by its column, each with every other frequency.

A square of patches becomes a token. The prompt has a further token after each row of them, with its own embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.ranks import RankPlace
from pagoda.core.request import MediaItem
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.linear import Linear
from pagoda.layers.mlp import GatedMLP
from pagoda.layers.module import Module, keep_floats
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Part
from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.layers.rotary import Rotary
from pagoda.models.base import FEATURES, Encoder, EncoderItem, ItemArray
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_activation
from pagoda.models.llama import Llama
from pagoda.models.siglip import JOINED, joined_patches
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation, Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

_EPS = 1e-5
_CHANNELS = 3
_MOST_SIDE = 4096  # patches along one side of an image: rows of the tower's rotary table


@dataclass(frozen=True, slots=True)
class PixtralConfig:
    """side: patches along one side of the largest image.   merge: patches that become a token, in each direction.

    activation: of the tower.   norm_eps, bias, projection: of what makes tokens of patches.
    """

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    side: int
    merge: int
    theta: float
    activation: Activation
    norm_eps: float
    bias: bool
    projection: Activation

    @property
    def patch_values(self) -> int:
        """Numbers of one flattened patch."""
        return _CHANNELS * self.patch_size**2


@dataclass(frozen=True, slots=True)
class WithPixtralConfig:
    """spec: of the text model."""

    spec: ModelSpec
    text: DecoderConfig
    tower: PixtralConfig


class PixtralLayer(Module):
    """Attention of an image's patches, and a gated MLP, each after a norm."""

    def __init__(self, config: PixtralConfig, rotary: Rotary) -> None:
        hidden = config.hidden_size
        heads = Heads(config.num_heads, config.num_heads, hidden // config.num_heads)
        self.attention_norm = RMSNorm(hidden, _EPS)
        self.attention = Attention(hidden, heads, rotary, causal=False)
        self.ffn_norm = RMSNorm(hidden, _EPS)
        self.feed_forward = GatedMLP(hidden, config.inner_size, config.activation)

    def __call__(
        self, ops: ForwardOps, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same."""
        x, residual = self.attention_norm.add(ops, x, residual)
        x, residual = self.attention(ops, x, residual, batch, (), last=False)
        x, residual = self.ffn_norm.add(ops, x, residual)
        return self.feed_forward(ops, x), residual


class PixtralLayers(Module):
    def __init__(self, config: PixtralConfig) -> None:
        rope = RopeConfig(RopeType.ALTERNATING, config.theta, axes=2)
        rotary = Rotary(rope, config.hidden_size // config.num_heads, num_positions=_MOST_SIDE)
        self.layers = [PixtralLayer(config, rotary) for _ in range(config.num_layers)]


class Pixtral(Module):
    """Patches of images to their final states, in two summands."""

    def __init__(self, config: PixtralConfig) -> None:
        kernel = (_CHANNELS, config.patch_size, config.patch_size)
        self.patch_conv = Linear(config.patch_values, config.hidden_size, kernel=kernel)
        self.ln_pre = RMSNorm(config.hidden_size, _EPS)
        self.transformer = PixtralLayers(config)

    def __call__(self, ops: ForwardOps, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """[num_patches, hidden], twice."""
        x, residual = self.ln_pre(ops, self.patch_conv(ops, batch.inputs[FEATURES].tensor)), None
        for layer in self.transformer.layers:
            x, residual = layer(ops, x, residual, batch)
        assert residual is not None, "a tower has layers"
        return x, residual


class PatchMerger(Module):
    """Joins the patches of a token, which the checkpoint has channel by channel."""

    def __init__(self, config: PixtralConfig) -> None:
        hidden, unit = config.hidden_size, config.merge**2
        self.merging_layer = Linear(hidden * unit, hidden, taps=unit)


class Projector(Module):
    """Patches to the embeddings of tokens."""

    def __init__(self, config: PixtralConfig, outputs: int) -> None:
        hidden = config.hidden_size
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.patch_merger = PatchMerger(config)
        self.linear_1 = Linear(hidden, (Part("linear_1", outputs),), config.bias)
        self.linear_2 = Linear(outputs, (Part("linear_2", outputs),), config.bias)
        self.activation = config.projection

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor, joined: Tensor) -> Tensor:
        """[num_patches, hidden] -> [num_outputs, outputs]."""
        x = ops.select_rows(self.norm.add(ops, x, residual)[0], joined)
        x = ops.activate(self.linear_1(ops, self.patch_merger.merging_layer(ops, x)), self.activation)
        return self.linear_2(ops, x)


class PixtralEncoder(Encoder):
    """Images to embeddings.

    An item is an image: features float32 [rows * columns, values of a patch], patches row by row; grid (rows, columns)
    in patches. Its outputs are in the order of the prompt: the last one of each row of tokens is not read.
    """

    def __init__(self, config: PixtralConfig, spec: ModelSpec) -> None:
        self.spec, self.config = spec, config
        self.output_size = spec.hidden_size
        self.tokens_per_output = config.merge**2
        self.vision_tower = Pixtral(config)
        self.multi_modal_projector = Projector(config, spec.hidden_size)
        keep_floats(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x, residual = self.vision_tower(ops, batch)
        return self.multi_modal_projector(ops, x, residual, batch.inputs[JOINED].tensor)

    def largest_item(self) -> MediaItem:
        side = self.config.side
        features = np.zeros((side * side, self.config.patch_values), np.float32)
        return MediaItem("", 0, self.num_outputs(features.shape, (side, side)), features, (side, side))

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        merge = self.config.merge
        if len(grid) != 2 or any(not 0 < n <= _MOST_SIDE or n % merge for n in grid):
            raise RequestError(
                f"the grid of an image is (rows, columns), multiples of {merge} of at most {_MOST_SIDE}, not {grid}",
                "media",
            )
        rows, columns = grid
        wanted = (rows * columns, self.config.patch_values)
        if tuple(shape) != wanted:
            raise RequestError(f"an image of the grid {grid} has features {wanted}, not {tuple(shape)}", "media")
        return rows // merge * (columns // merge + 1)

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        rows, columns = grid
        merge = self.config.merge
        joined = joined_patches(rows, columns, merge).reshape(rows // merge, columns // merge, -1)
        joined = np.concatenate((joined, joined[:, -1:]), 1).reshape(-1, merge**2)
        inputs = {FEATURES: ItemArray(features), JOINED: ItemArray(joined, Domain.OUTPUTS, Domain.TOKENS)}
        at = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).astype(np.int32)
        return EncoderItem((np.array([rows * columns], np.int32),), len(joined), inputs, at.reshape(-1, 2))

    def has_own_embedding(self, grid: tuple[int, ...]) -> np.ndarray:
        rows, columns = (size // self.config.merge for size in grid)
        return np.tile(np.arange(columns + 1) == columns, rows)


class WithPixtral(Llama):
    """A decoder with the tower."""

    def __init__(self, config: WithPixtralConfig) -> None:
        super().__init__(config.text)
        self.vision = PixtralEncoder(config.tower, config.spec)

    @property
    def media_encoder(self) -> PixtralEncoder | None:
        return None if self.vision.is_elsewhere else self.vision

    def take_stage(self, place: RankPlace, ranks: RankGroup) -> None:
        self.vision.is_elsewhere = not place.is_first_stage
        super().take_stage(place, ranks)


def make_model(config: DecoderConfig | WithPixtralConfig) -> Llama:
    return WithPixtral(config) if isinstance(config, WithPixtralConfig) else Llama(config)


def with_tower(config: ConfigReader, decoder: DecoderConfig) -> DecoderConfig | WithPixtralConfig:
    """Return a decoder with the tower, if the checkpoint's architecture has it. Raises ConfigError."""
    vision = config.section("vision_config")
    if vision is None or config.texts("architectures") != (WITH_VISION,):
        return decoder
    vision.choice("model_type", ("pixtral",), "pixtral")
    config.expect("vision_feature_layer", -1)
    hidden_size, num_heads = vision.integer("hidden_size", 1024), vision.integer("num_attention_heads", 16)
    if hidden_size % num_heads or hidden_size // num_heads % 4:
        raise ConfigError(
            f"{vision.origin}: hidden_size {hidden_size} does not divide into {num_heads} heads of a multiple of 4"
        )
    vision.expect("head_dim", hidden_size // num_heads)
    vision.expect("num_channels", _CHANNELS)
    patch, merge = vision.integer("patch_size", 16), config.integer("spatial_merge_size", 2, most=16)
    side = vision.integer("image_size", 1024) // patch // merge * merge
    if not 0 < side <= _MOST_SIDE:
        raise vision.wrong("image_size", f"{merge * patch} to {_MOST_SIDE * patch}")
    rope = vision.section("rope_parameters") or vision
    rope.choice("rope_type", ("axial", "default"), "axial")
    tower = PixtralConfig(
        hidden_size=hidden_size,
        inner_size=vision.integer("intermediate_size", 4096),
        num_layers=vision.integer("num_hidden_layers", 24, most=4096),
        num_heads=num_heads,
        patch_size=patch,
        side=side,
        merge=merge,
        theta=rope.positive("rope_theta", 10_000.0),
        activation=read_activation(vision, default="gelu"),
        norm_eps=decoder.norm_eps,
        bias=config.flag("multimodal_projector_bias", False),
        projection=read_activation(config, "projector_hidden_act", "gelu"),
    )
    return WithPixtralConfig(decoder.spec, decoder, tower)


WITH_VISION = "Mistral3ForConditionalGeneration"
