"""nanochat: norms without weights, one of them of the embeddings, q and k normed per head, an MLP without a gate and
with the square of a ReLU, a soft cap on logits, and heads that turn the other way round.
"""

from dataclasses import replace

from pagoda.base.ranks import RankPlace
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, Norm, QKNorm, read_decoder
from pagoda.models.llama import Llama, LlamaModel
from pagoda.models.naming import BARE, Naming
from pagoda.ops.batch import ForwardBatch
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import RankGroup, Tensor


class NanoChatModel(LlamaModel):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed_norm = config.norm()

    def take_stage(self, place: RankPlace, ranks: RankGroup, is_tied: bool) -> None:
        super().take_stage(place, ranks, is_tied)
        self.embed_norm.is_elsewhere = not place.is_first_stage

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        return self.embed_norm(ops, super().embed(ops, batch)[0]), None


class NanoChat(Llama):
    body = NanoChatModel


def read(config: ConfigReader) -> DecoderConfig:
    config = config.changed({"final_logit_softcapping": 15.0, **config.values})
    decoder = read_decoder(config, "nanochat", plain_mlp=True, default_activation="relu2")
    bias, rope = config.flag("attention_bias", False), replace(decoder.rope_full, backwards=True)
    return replace(
        decoder,
        rope_full=rope,
        rope_window=rope,
        norm_kind=Norm.RMS_WITHOUT_WEIGHT,
        # Such norms and the rotary embedding can change places: here it comes after them.
        qk_norm=QKNorm.HEAD,
        logit_softcap=config.not_negative("final_logit_softcapping", 0.0),
        qkv_bias=bias,
        attention_out_bias=bias,
    )


_TENSORS = ((r"\.mlp\.up_proj\.", ".mlp.fc1."), (r"\.mlp\.down_proj\.", ".mlp.fc2."))

NANOCHAT = Architecture(
    name="nanochat",
    title="nanochat",
    hf_names=("NanoChatForCausalLM",),
    model=NanoChat,
    read=read,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=BARE.substitutions + _TENSORS)),
)
