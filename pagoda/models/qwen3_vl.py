"""Qwen3-VL: a Qwen3 whose pairs take a time, a row and a column in turn as their position. Its tower adds to each patch
an embedding of its place, from a table that is resampled to the image's size.

DeepStack: some layers of the tower give outputs of their own, which the first layers of the decoder add to the tokens
of the image.

Qwen3-VL-MoE: the same with a Qwen3-MoE.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt

import numpy as np

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.ranks import RankPlace
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.linear import EMBED_ROWS, EMBEDS, Embedding, Linear
from pagoda.layers.mlp import PlainMLP
from pagoda.layers.module import Module, keep_floats
from pagoda.layers.norm import LayerNorm
from pagoda.layers.parameter import Axis, Part, Table
from pagoda.layers.rope_config import RopeConfig
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.base import FEATURES, POSITION_KINDS, EncoderItem, ItemArray
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_text_settings
from pagoda.models.decoder_layers import LlamaLayer
from pagoda.models.llama import Llama, LlamaModel
from pagoda.models.naming import HF, STACKED_EXPERTS, Naming
from pagoda.models.qwen import QWEN3, QWEN3_MOE
from pagoda.models.qwen2_5_vl import Qwen25VL, Qwen25VLEncoder, TowerConfig, places_of_patches, read_tower
from pagoda.models.siglip import JOINED
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Activation, Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

_EPS = 1e-6
_MOST_SIDE = 4096
_CORNERS = tuple((f"corner_{at}", f"corner_weight_{at}") for at in range(4))
"""Inputs of the tower: the four rows of the table of places that are nearest to each patch, and their weights."""
_TOWER: dict[str, object] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "window_size": 1 << 20,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepTowerConfig(TowerConfig):
    """side: of the square table of places.   deep_layers: those that give outputs of their own, in order."""

    side: int
    deep_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepStackConfig(DecoderConfig):
    """num_deep: layers that add outputs of the tower."""

    num_deep: int


@dataclass(frozen=True, slots=True)
class Qwen3VLConfig:
    """spec: of the text model.   position_runs: see Model."""

    spec: ModelSpec
    text: DecoderConfig
    tower: DeepTowerConfig
    position_runs: tuple[int, ...]


class PatchEmbed(Module):
    """See qwen2_5_vl; with a bias."""

    def __init__(self, config: TowerConfig) -> None:
        self.proj = Linear(config.patch_values, config.hidden_size, True, kernel=config.kernel)


class VisionBlock(Module):
    """Attention of an image's patches, and an MLP, each after a norm."""

    def __init__(self, config: TowerConfig, rotary: Rotary) -> None:
        hidden = config.hidden_size
        heads = Heads(config.num_heads, config.num_heads, hidden // config.num_heads)
        self.norm1 = LayerNorm(hidden, _EPS)
        self.attn = Attention(
            hidden, heads, rotary, causal=False, qkv_bias=True, out_bias=True, names=("qkv", "qkv", "qkv"), out="proj"
        )
        self.norm2 = LayerNorm(hidden, _EPS)
        names = "linear_fc1", "linear_fc2"
        self.mlp = PlainMLP(hidden, config.inner_size, config.activation, bias=True, names=names)

    def __call__(
        self, ops: ForwardOps, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], not yet added to the residual stream -> the same."""
        x, residual = self.norm1.add(ops, x, residual)
        x, residual = self.attn(ops, x, residual, batch, (), last=False)
        x, residual = self.norm2.add(ops, x, residual)
        return self.mlp(ops, x), residual


class PatchMerger(Module):
    """Joins the patches of a token.   is_deep: they are normed together, once they are joined."""

    def __init__(self, config: TowerConfig, is_deep: bool) -> None:
        inner = config.hidden_size * config.merge**2
        self.norm = LayerNorm(inner if is_deep else config.hidden_size, _EPS)
        self.linear_fc1 = Linear(inner, (Part("linear_fc1", inner),), True, Axis.OUT)
        self.linear_fc2 = Linear(inner, (Part("linear_fc2", config.output_size),), True, Axis.IN)
        self.is_deep = is_deep

    def __call__(self, ops: ForwardOps, x: Tensor, joined: Tensor) -> Tensor:
        """[T, hidden] -> [outputs, output_size]."""
        x = self.norm(ops, ops.select_rows(x, joined)) if self.is_deep else ops.select_rows(self.norm(ops, x), joined)
        return self.linear_fc2(ops, ops.activate(self.linear_fc1(ops, x), Activation.GELU))


class Qwen3VLEncoder(Qwen25VLEncoder):
    """Images to embeddings, followed in each row by the outputs of `deep_layers`. Items are those of Qwen2.5-VL."""

    def __init__(self, config: DeepTowerConfig, spec: ModelSpec) -> None:
        self.spec, self.config, self.tower = spec, config, config
        self.output_size = config.output_size * (1 + len(config.deep_layers))
        self.tokens_per_output = config.merge**2
        rotary = Rotary(RopeConfig(axes=2), config.hidden_size // config.num_heads, num_positions=_MOST_SIDE)
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = Embedding(config.side**2, config.hidden_size, is_divided=False)
        self.blocks = [VisionBlock(config, rotary) for _ in range(config.num_layers)]
        self.merger = PatchMerger(config, is_deep=False)
        self.deepstack_merger_list = [PatchMerger(config, is_deep=True) for _ in config.deep_layers]
        keep_floats(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        joined = batch.inputs[JOINED].tensor
        x, residual = self.patch_embed.proj(ops, batch.inputs[FEATURES].tensor), None
        for corner, weight in _CORNERS:
            place = self.pos_embed(ops, batch.inputs[corner].tensor)
            x = ops.add(ops.scale_rows(place, batch.inputs[weight].tensor), x)
        deep: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x, residual = block(ops, x, residual, batch)
            if index in self.tower.deep_layers:
                merger = self.deepstack_merger_list[self.tower.deep_layers.index(index)]
                deep.append(merger(ops, ops.add(x, residual), joined))
        assert residual is not None, "a tower has layers"
        made = self.merger(ops, ops.add(x, residual), joined)
        for other in deep:
            made = ops.join(made, other)
        return made

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        _, rows, columns = grid
        at = places_of_patches(rows, columns, self.config.merge)
        joined = np.arange(len(at), dtype=np.int64).reshape(-1, self.config.merge**2)
        inputs = {FEATURES: ItemArray(features), JOINED: ItemArray(joined, Domain.OUTPUTS, Domain.TOKENS)}
        indices, weights = corners(at, rows, columns, self.tower.side)
        for number, (corner, weight) in enumerate(_CORNERS):
            inputs[corner] = ItemArray(indices[:, number])
            inputs[weight] = ItemArray(weights[:, number : number + 1])
        return EncoderItem((np.array([len(at)], np.int32),), len(joined), inputs, at)


def corners(at: np.ndarray, rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four places in a square table around each place of an image, and their weights.

    The corners of the image are those of the table.   at: rows and columns, [n, 2].   -> int32 [n, 4], float32 [n, 4].
    """
    lengths = np.maximum(np.array([rows, columns]) - 1, 1).astype(np.float32)
    exact = at.astype(np.float32) * np.float32(side - 1) / lengths
    low = np.floor(exact)
    share = exact - low
    first, second = low.astype(np.int32), np.minimum(low.astype(np.int32) + 1, side - 1)
    of_rows, of_columns = np.stack((first[:, 0], second[:, 0]), 1), np.stack((first[:, 1], second[:, 1]), 1)
    row_weights, column_weights = (np.stack((1 - share[:, axis], share[:, axis]), 1) for axis in (0, 1))
    indices = of_rows[:, :, None] * side + of_columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.reshape(-1, 4), weights.reshape(-1, 4)


class DeepLayer(LlamaLayer):
    """A layer after which the tokens of images may get outputs of the tower."""

    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        assert isinstance(config, DeepStackConfig)
        super().__init__(config, index, rotary)
        self.is_deep, self.size = index < config.num_deep, config.spec.hidden_size
        self.first = (index + 1) * self.size

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv: Sequence[KVLayer],
        last: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().__call__(ops, x, residual, batch, kv, last)
        given = batch.inputs.get(EMBEDS)
        if given is None or not self.is_deep or last:  # such a layer is the last one of a draft alone
            return x, residual
        added = ops.scale(x, 0.0)
        ops.put_rows(added, ops.select_heads(given.tensor, self.first, 1, self.size), batch.inputs[EMBED_ROWS].tensor)
        return ops.add(x, added), residual


class DeepStackModel(LlamaModel):
    def __init__(self, config: DeepStackConfig) -> None:
        super().__init__(config)
        self.num_deep = config.num_deep

    def take_stage(self, place: RankPlace, ranks: RankGroup, is_tied: bool) -> None:
        """Raises ConfigError if not all layers that read outputs of the tower are in the first stage, also."""
        if len(self.layers) // place.num_stages < self.num_deep:
            raise ConfigError(
                f"pipeline_parallel_size={place.num_stages}: the first {self.num_deep} of {len(self.layers)} layers "
                "read outputs of the vision tower, so they must be in the first stage; take fewer stages, or "
                "tensor_parallel_size"
            )
        super().take_stage(place, ranks, is_tied)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        given = batch.inputs.get(EMBEDS)
        if given is None:
            return super().embed(ops, batch)
        x = self.embed_tokens(ops, batch.token_ids)
        table = self.embed_tokens.weight.declared
        assert isinstance(table, Table)
        size = table.columns
        ops.put_rows(x, ops.select_heads(given.tensor, 0, 1, size), batch.inputs[EMBED_ROWS].tensor)
        return x, None


class WithTower(Qwen25VL):
    """A decoder with the tower, without DeepStack."""

    encoder = Qwen3VLEncoder


class DeepStack(WithTower):
    body = DeepStackModel
    takes_embeds = False  # the rows of images are longer


def make_model(config: DecoderConfig | Qwen3VLConfig) -> Llama:
    if not isinstance(config, Qwen3VLConfig):
        return Llama(config)
    return DeepStack(config) if isinstance(config.text, DeepStackConfig) else WithTower(config)


def with_tower(
    config: ConfigReader, text: ConfigReader, decoder: DecoderConfig, sections: tuple[int, ...]
) -> DecoderConfig | Qwen3VLConfig:
    """Return a decoder with the tower, if the checkpoint's architecture has it. Raises ConfigError.

    text: the settings of `decoder`.   sections: the default of `mrope_section`.
    """
    vision, names = config.section("vision_config"), config.texts("architectures") or ()
    if vision is None or not any(name.endswith("ForConditionalGeneration") for name in names):
        return decoder
    spec = decoder.spec
    vision = vision.with_defaults(_TOWER)
    tower = read_tower(vision, spec.hidden_size)
    places = vision.integer("num_position_embeddings", 2304)
    if isqrt(places) ** 2 != places:
        raise vision.wrong("num_position_embeddings", "a square")
    deep = vision.ids("deepstack_visual_indexes")
    if list(deep) != sorted(set(deep)) or any(at >= tower.num_layers for at in deep):
        raise vision.wrong("deepstack_visual_indexes", f"indices of the {tower.num_layers} layers, in order")
    if len(deep) >= spec.num_layers:
        raise vision.wrong("deepstack_visual_indexes", f"fewer than the {spec.num_layers} layers of the text model")
    made = {field.name: getattr(tower, field.name) for field in fields(tower)}
    deep_tower = DeepTowerConfig(side=isqrt(places), deep_layers=deep, **made)
    return Qwen3VLConfig(spec, decoder, deep_tower, _position_runs(text, decoder, sections))


def _position_runs(text: ConfigReader, decoder: DecoderConfig, sections: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of a token's positions each pair of a head takes: in turn, as far as a section has pairs."""
    rope = text.section("rope_parameters") or text.section("rope_scaling") or ConfigReader({}, text.origin)
    rope.expect("mrope_interleaved", True)
    counts = tuple(rope.ids("mrope_section")) or sections
    turned = decoder.rope_full.num_rotated(decoder.spec.head_dim) // 2
    if len(counts) != POSITION_KINDS:
        raise rope.wrong("mrope_section", "three numbers")
    kinds = [0] * (decoder.spec.head_dim // 2)
    for kind in (1, 2):
        for pair in range(kind, min(counts[kind] * POSITION_KINDS, turned), POSITION_KINDS):
            kinds[pair] = kind
    return tuple(kinds)


def _read(config: ConfigReader) -> DecoderConfig | Qwen3VLConfig:
    return _read_as(config, read_text_settings(config, "qwen3_vl_text", "qwen3_vl"), QWEN3, "qwen3_vl")


def _read_moe(config: ConfigReader) -> DecoderConfig | Qwen3VLConfig:
    text = read_text_settings(config, "qwen3_vl_moe_text", "qwen3_vl_moe")
    # transformers renormalises, whatever the setting says, which only says it for other programs.
    return _read_as(config, text.changed({"norm_topk_prob": True}), QWEN3_MOE, "qwen3_vl_moe")


def _read_as(config: ConfigReader, text: ConfigReader, of: Architecture, name: str) -> DecoderConfig | Qwen3VLConfig:
    """Read a model whose text model is one of `of`.   text: its settings."""
    key = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
    rope = text.section(key) or ConfigReader({}, text.origin)
    plain = {name: value for name, value in rope.values.items() if not name.startswith("mrope_")}
    decoder = of.read(text.changed({key: plain}).with_defaults({"rope_theta": 500_000.0, "head_dim": 128}))
    decoder = replace(decoder, spec=replace(decoder.spec, architecture=name))
    if (vision := config.section("vision_config")) is not None:
        vision = vision.with_defaults({"deepstack_visual_indexes": [8, 16, 24]})
        config = config.changed({"vision_config": vision.values})
    made = with_tower(config, text, decoder, (24, 20, 20))
    if not isinstance(made, Qwen3VLConfig) or not made.tower.deep_layers:
        return made
    deep = replace(decoder, layer=DeepLayer)
    given = {field.name: getattr(deep, field.name) for field in fields(deep)}
    return replace(made, text=DeepStackConfig(num_deep=len(made.tower.deep_layers), **given))


_HF = (Naming(substitutions=((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual."))), HF)

QWEN3_VL = Architecture(
    name="qwen3_vl",
    title="Qwen3-VL",
    hf_names=("Qwen3VLForConditionalGeneration",),
    model=make_model,
    read=_read,
    hf=_HF,
)
QWEN3_VL_MOE = Architecture(
    name="qwen3_vl_moe",
    title="Qwen3-VL-MoE",
    hf_names=("Qwen3VLMoeForConditionalGeneration",),
    model=make_model,
    read=_read_moe,
    hf=tuple(
        replace(naming, substitutions=(*STACKED_EXPERTS, *naming.substitutions), transposed=r"\.experts\.\w+_proj$")
        for naming in _HF
    ),
)
