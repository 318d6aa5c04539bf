"""Qwen2.5-VL: images of any size; most layers of the tower attend within windows, tokens have positions of three kinds.

A position is a time, a row and a column. They are equal for text, so that a text alone is computed as by a Qwen2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt
from typing import Protocol

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.ranks import RankPlace
from pagoda.core.request import MediaItem
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.kv import KVPlace
from pagoda.layers.linear import Linear
from pagoda.layers.mlp import GatedMLP
from pagoda.layers.module import Module, keep_floats
from pagoda.layers.norm import RMSNorm
from pagoda.layers.parameter import Axis, Part
from pagoda.layers.rope_config import RopeConfig
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.base import FEATURES, POSITION_KINDS, Encoder, EncoderItem, ItemArray
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_activation, read_text_settings
from pagoda.models.llama import Llama
from pagoda.models.naming import HF, Naming
from pagoda.models.qwen import read_qwen2
from pagoda.models.siglip import JOINED
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation, Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

_EPS = 1e-6
_CHANNELS = 3
_MOST_SIDE = 4096  # patches along one side of an image: rows of the tower's rotary table
_MOST_TOKENS = 16_384  # of an image, as the checkpoints' own processing has it


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """patch_values: numbers of a flattened patch, of shape `kernel`.   merge: patches that become a token, in each
    direction.   window: tokens along one side of a window.   full_layers: those that attend to the whole image.
    """

    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    kernel: tuple[int, ...]
    merge: int
    window: int
    full_layers: frozenset[int]
    activation: Activation
    output_size: int

    @property
    def patch_values(self) -> int:
        channels, times, rows, columns = self.kernel
        return channels * times * rows * columns


@dataclass(frozen=True, slots=True)
class Qwen25VLConfig:
    """spec: of the text model.   sections: pairs of a head that have a time, a row, a column as their position."""

    spec: ModelSpec
    text: DecoderConfig
    tower: TowerConfig
    sections: tuple[int, ...]

    @property
    def position_runs(self) -> tuple[int, ...]:
        """See Model."""
        run = gcd(*self.sections)
        return tuple(index % POSITION_KINDS for index, count in enumerate(self.sections) for _ in range(count // run))


class WithTowerConfig(Protocol):
    """What Qwen25VL is made of, here and with other towers."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def text(self) -> DecoderConfig: ...

    @property
    def tower(self) -> TowerConfig: ...

    @property
    def position_runs(self) -> tuple[int, ...]: ...


class PatchEmbed(Module):
    """A convolution whose windows do not overlap: a linear layer of flattened patches."""

    def __init__(self, config: TowerConfig) -> None:
        self.proj = Linear(config.patch_values, config.hidden_size, kernel=config.kernel)


class VisionBlock(Module):
    """Attention of an image's patches, and a gated MLP, each after a norm."""

    def __init__(self, config: TowerConfig, index: int, rotary: Rotary) -> None:
        hidden = config.hidden_size
        heads = Heads(config.num_heads, config.num_heads, hidden // config.num_heads)
        self.norm1 = RMSNorm(hidden, _EPS)
        self.attn = Attention(
            hidden, heads, rotary, causal=False, qkv_bias=True, out_bias=True, names=("qkv", "qkv", "qkv"), out="proj"
        )
        self.attn.place = KVPlace(group=0 if index in config.full_layers else 1)
        self.norm2 = RMSNorm(hidden, _EPS)
        self.mlp = GatedMLP(hidden, config.inner_size, config.activation, bias=True)

    def __call__(
        self, ops: ForwardOps, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same."""
        x, residual = self.norm1.add(ops, x, residual)
        x, residual = self.attn(ops, x, residual, batch, (), last=False)
        x, residual = self.norm2.add(ops, x, residual)
        return self.mlp(ops, x), residual


class PatchMerger(Module):
    """Joins the patches of a token."""

    def __init__(self, config: TowerConfig) -> None:
        inner = config.hidden_size * config.merge**2
        self.ln_q = RMSNorm(config.hidden_size, _EPS)
        first = Linear(inner, (Part("0", inner),), True, Axis.OUT)
        self.mlp = [first, None, Linear(inner, (Part("2", config.output_size),), True, Axis.IN)]

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor, joined: Tensor) -> Tensor:
        """[T, hidden] -> [outputs, output_size]."""
        first, _, second = self.mlp
        assert first is not None
        assert second is not None
        x = ops.select_rows(self.ln_q.add(ops, x, residual)[0], joined)
        return second(ops, ops.activate(first(ops, x), Activation.GELU))


class Qwen25VLEncoder(Encoder):
    """Images to embeddings.

    An item is an image: features float32 [rows * columns, values of a patch], grid (1, rows, columns) in patches; the
    merge ** 2 patches of a token are next to each other, and these groups are row by row.
    """

    def __init__(self, config: TowerConfig, spec: ModelSpec) -> None:
        self.spec = spec
        self.config = config
        self.output_size = config.output_size
        self.tokens_per_output = config.merge**2
        rotary = Rotary(RopeConfig(axes=2), config.hidden_size // config.num_heads, num_positions=_MOST_SIDE)
        self.patch_embed = PatchEmbed(config)
        self.blocks = [VisionBlock(config, index, rotary) for index in range(config.num_layers)]
        self.merger = PatchMerger(config)
        keep_floats(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x, residual = self.patch_embed.proj(ops, batch.inputs[FEATURES].tensor), None
        for block in self.blocks:
            x, residual = block(ops, x, residual, batch)
        assert residual is not None, "a tower has layers"
        return self.merger(ops, x, residual, batch.inputs[JOINED].tensor)

    def largest_item(self) -> MediaItem:
        side = isqrt(min(_MOST_TOKENS, self.spec.max_position)) * self.config.merge
        features = np.zeros((side * side, self.config.patch_values), np.float32)
        grid = (1, side, side)
        return MediaItem("", 0, self.num_outputs(features.shape, grid), features, grid)

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        merge = self.config.merge
        if len(grid) != 3 or grid[0] != 1 or any(not 0 < n <= _MOST_SIDE or n % merge for n in grid[1:]):
            raise RequestError(
                f"the grid of an image is (1, rows, columns), these multiples of {merge} of at most {_MOST_SIDE}, not "
                f"{grid}",
                "media",
            )
        wanted = (grid[1] * grid[2], self.config.patch_values)
        if tuple(shape) != wanted:
            raise RequestError(f"an image of the grid {grid} has features {wanted}, not {tuple(shape)}", "media")
        return wanted[0] // merge**2

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        _, rows, columns = grid
        merge = self.config.merge
        unit = merge * merge
        order, lengths = windows(rows // merge, columns // merge, self.config.window)
        tokens = (order[:, None] * unit + np.arange(unit)).reshape(-1)  # the tower computes window after window
        at = places_of_patches(rows, columns, merge)
        where = np.argsort(order)
        joined = (where[:, None] * unit + np.arange(unit)).astype(np.int64)
        return EncoderItem(
            (np.array([len(tokens)], np.int32), (lengths * unit).astype(np.int32)),
            len(order),
            {FEATURES: ItemArray(features[tokens]), JOINED: ItemArray(joined, Domain.OUTPUTS, Domain.TOKENS)},
            at[tokens],
        )


def places_of_patches(rows: int, columns: int, merge: int) -> np.ndarray:
    """Return the row and the column of each patch, those of a token next to each other; int32 [patches, 2]."""
    at = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).astype(np.int32)
    return at.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def windows(rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells of a grid (numbered row by row) window after window, and how many each window has."""
    cells = np.arange(rows * columns).reshape(rows, columns)
    parts = [
        cells[row : row + side, column : column + side].reshape(-1)
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    return np.concatenate(parts), np.array([len(part) for part in parts])


class Qwen25VL(Llama):
    encoder = Qwen25VLEncoder

    def __init__(self, config: WithTowerConfig) -> None:
        super().__init__(replace(config.text, spec=config.spec))
        self.visual = self.encoder(config.tower, config.spec)
        self.position_runs = config.position_runs

    @property
    def media_encoder(self) -> Qwen25VLEncoder | None:
        return None if self.visual.is_elsewhere else self.visual

    def media_positions(self, grid: tuple[int, ...]) -> tuple[np.ndarray, int]:
        rows, columns = (size // self.visual.config.merge for size in grid[1:])
        at = np.stack(np.meshgrid(np.arange(1), np.arange(rows), np.arange(columns), indexing="ij"), -1)
        return at.reshape(-1, POSITION_KINDS).astype(np.int32), max(rows, columns)

    def take_stage(self, place: RankPlace, ranks: RankGroup) -> None:
        self.visual.is_elsewhere = not place.is_first_stage
        super().take_stage(place, ranks)


def _read(config: ConfigReader) -> Qwen25VLConfig:
    text = read_text_settings(config, "qwen2_5_vl_text", "qwen2_5_vl")
    key = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
    rope = text.section(key) or ConfigReader({}, text.origin)
    rope.refuse("mrope_interleaved")
    sections = tuple(rope.ids("mrope_section")) or (16, 24, 24)
    values = {name: value for name, value in rope.values.items() if name != "mrope_section"}
    for name in ("type", "rope_type"):
        if values.get(name) == "mrope":
            values[name] = "default"
    decoder = read_qwen2(ConfigReader({"rope_theta": 1_000_000.0, **text.values, key: values}, text.origin))
    if sum(sections) != decoder.spec.head_dim // 2 or not all(sections):
        raise ConfigError(
            f"{rope.origin}: mrope_section = {list(sections)} does not add up to half a head of {decoder.spec.head_dim}"
        )
    vision = config.section("vision_config") or ConfigReader({}, f"{config.origin}: vision_config")
    tower = read_tower(vision, decoder.spec.hidden_size)
    return Qwen25VLConfig(replace(decoder.spec, architecture="qwen2_5_vl"), decoder, tower, sections)


def read_tower(config: ConfigReader, text_size: int) -> TowerConfig:
    """Read a tower whose outputs have `text_size` elements. Raises ConfigError."""
    hidden_size, num_heads = config.integer("hidden_size", 3584), config.integer("num_heads", 16)
    if hidden_size % num_heads or hidden_size // num_heads % 4:
        raise ConfigError(
            f"{config.origin}: hidden_size {hidden_size} does not divide into {num_heads} heads of a multiple of 4"
        )
    channels = config.integer("in_channels", config.integer("in_chans", _CHANNELS))
    if channels != _CHANNELS:
        raise config.wrong("in_channels", str(_CHANNELS))
    patch, merge = config.integer("patch_size", 14, most=1024), config.integer("spatial_merge_size", 2, most=16)
    if (rope := config.section("rope_parameters")) is not None:
        rope.choice("rope_type", ("axial", "default"), "default")
        rope.expect("rope_theta", RopeConfig().theta)
    if (output_size := config.integer("out_hidden_size", 3584)) != text_size:
        raise ConfigError(
            f"{config.origin}: out_hidden_size = {output_size} of the tower is not the text model's hidden_size, "
            f"{text_size}"
        )
    window = config.integer("window_size", 112) // merge // patch
    if not window:
        raise config.wrong("window_size", f"at least {merge * patch} pixels")
    full = config.ids("fullatt_block_indexes") if config.has("fullatt_block_indexes") else (7, 15, 23, 31)
    return TowerConfig(
        hidden_size=hidden_size,
        inner_size=config.integer("intermediate_size", 3420),
        num_layers=config.integer("depth", 32, most=4096),
        num_heads=num_heads,
        kernel=(channels, config.integer("temporal_patch_size", 2, most=16), patch, patch),
        merge=merge,
        window=window,
        full_layers=frozenset(full),
        activation=read_activation(config),
        output_size=output_size,
    )


QWEN2_5_VL = Architecture(
    name="qwen2_5_vl",
    title="Qwen2.5-VL",
    hf_names=("Qwen2_5_VLForConditionalGeneration",),
    model=Qwen25VL,
    read=_read,
    hf=(
        Naming(substitutions=((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual."))),
        HF,
    ),
)
