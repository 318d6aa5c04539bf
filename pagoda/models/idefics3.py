"""Idefics3 and SmolVLM: a SigLIP tower over square tiles, whose patches are joined into fewer tokens, and a Llama."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.ranks import RankPlace
from pagoda.core.request import MediaItem
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module, keep_floats
from pagoda.layers.parameter import Part
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_text_settings
from pagoda.models.encoder import FEATURES, Encoder, EncoderItem, ItemArray
from pagoda.models.llama import Llama, read
from pagoda.models.naming import Naming
from pagoda.models.siglip import Siglip, SiglipConfig, read_siglip
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.declare import Domain
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor

JOINED = "joined_patches"
"""Input of a tower's batch: int64 [outputs, n], the tokens of which an output is made."""


@dataclass(frozen=True, slots=True)
class Idefics3Config:
    """spec: of the text model.   scale_factor: patches that become one token, in each direction."""

    spec: ModelSpec
    text: DecoderConfig
    vision: SiglipConfig
    scale_factor: int


class Connector(Module):
    """Joined patches to a token's embedding."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.modality_projection = Linear(inputs, (Part("modality_projection.proj", outputs),))

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.modality_projection(ops, x)


class Idefics3Encoder(Encoder):
    """Tiles to embeddings.

    An item is a tile: features float32 [side * side, values of a patch], patches row by row; grid (side, side). A patch
    has its own place as its position. transformers looks that up as a fraction of the tile, in float32, which for some
    sizes gives the place before; those of known checkpoints (26, 27, 32 and 70 patches) are not among them.
    """

    def __init__(self, config: Idefics3Config) -> None:
        self.spec = config.spec
        self.config = config
        self.output_size = config.spec.hidden_size
        self.vision_model = Siglip(config.vision)
        self.connector = Connector(config.vision.hidden_size * config.scale_factor**2, self.output_size)
        keep_floats(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.vision_model(ops, batch)
        return self.connector(ops, ops.select_rows(x, batch.inputs[JOINED].tensor))

    def largest_item(self) -> MediaItem:
        vision = self.config.vision
        grid = (vision.side, vision.side)
        features = np.zeros((vision.side**2, vision.patch_values), np.float32)
        return MediaItem("", 0, self.num_outputs(features.shape, grid), features, grid)

    def num_outputs(self, shape: Sequence[int], grid: tuple[int, ...]) -> int:
        vision = self.config.vision
        wanted = (vision.side**2, vision.patch_values)
        if tuple(shape) != wanted or grid != (vision.side, vision.side):
            raise RequestError(
                f"a tile has features {wanted} and the grid {(vision.side, vision.side)}, not {tuple(shape)} and "
                f"{grid}",
                "media",
            )
        return (vision.side // self.config.scale_factor) ** 2

    def item(self, features: np.ndarray, grid: tuple[int, ...]) -> EncoderItem:
        side = self.config.vision.side
        joined = joined_patches(side, side, self.config.scale_factor)
        return EncoderItem(
            (np.array([side * side], np.int32),),
            len(joined),
            {FEATURES: ItemArray(features), JOINED: ItemArray(joined, Domain.TAIL, Domain.TOKENS)},
        )


def joined_patches(rows: int, columns: int, factor: int) -> np.ndarray:
    """Return the patches of each square of factor x factor, row by row; int64 [squares, factor ** 2]."""
    patches = np.arange(rows * columns, dtype=np.int64).reshape(rows // factor, factor, columns // factor, factor)
    return patches.transpose(0, 2, 1, 3).reshape(-1, factor * factor)


class Idefics3(Llama):
    def __init__(self, config: Idefics3Config) -> None:
        super().__init__(replace(config.text, spec=config.spec))
        self.vision = Idefics3Encoder(config)

    @property
    def media_encoder(self) -> Idefics3Encoder | None:
        return None if self.vision.is_elsewhere else self.vision

    def take_stage(self, place: RankPlace, ranks: RankGroup) -> None:
        self.vision.is_elsewhere = not place.is_first_stage
        super().take_stage(place, ranks)


def _read(config: ConfigReader) -> Idefics3Config:
    text, vision = (
        read_text_settings(config, "llama"),
        config.section("vision_config") or ConfigReader({}, config.origin),
    )
    text.refuse("qk_layer_norms")
    tower, factor = read_siglip(vision), config.integer("scale_factor", 2, most=16)
    if tower.side % factor:
        raise ConfigError(f"{config.origin}: scale_factor = {factor} does not divide {tower.side} patches")
    decoder = read(text)
    return Idefics3Config(replace(decoder.spec, architecture="idefics3"), decoder, tower, factor)


IDEFICS3 = Architecture(
    name="idefics3",
    hf_names=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model=Idefics3,
    read=_read,
    hf=(Naming(substitutions=((r"^model\.", "model.text_model."), (r"^vision\.", "model."))),),
)
