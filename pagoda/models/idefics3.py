"""Idefics3 and SmolVLM: a SigLIP tower over square tiles, whose patches are joined into fewer tokens, and a Llama."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.base.errors import ConfigError
from pagoda.base.model_spec import ModelSpec
from pagoda.base.ranks import RankPlace
from pagoda.layers.linear import Linear
from pagoda.layers.module import Module, keep_floats
from pagoda.layers.parameter import Part
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, read_text_settings
from pagoda.models.llama import Llama, read
from pagoda.models.naming import Naming
from pagoda.models.siglip import JOINED, Siglip, SiglipConfig, SiglipEncoder, read_siglip
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


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


class Idefics3Encoder(SiglipEncoder):
    """Tiles to embeddings: the states of neighbouring patches, one after the other, and a linear layer."""

    def __init__(self, config: Idefics3Config) -> None:
        super().__init__(config.vision, config.scale_factor, config.spec)
        self.vision_model = Siglip(config.vision)
        self.connector = Connector(config.vision.hidden_size * config.scale_factor**2, self.output_size)
        keep_floats(self)

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        x = self.vision_model(ops, batch)
        return self.connector(ops, ops.select_rows(x, batch.inputs[JOINED].tensor))


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
    title="SmolVLM and Idefics3",
    hf_names=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model=Idefics3,
    read=_read,
    hf=(Naming(substitutions=((r"^model\.", "model.text_model."), (r"^vision\.", "model."))),),
)
