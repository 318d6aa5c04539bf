"""Apertus: a Llama with q and k normed per head, and an MLP without a gate whose activation is xIELU, with trained
numbers of its own in each layer.
"""

import math
from dataclasses import replace

from pagoda.layers.mlp import PlainMLP
from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Vector
from pagoda.layers.rotary import Rotary
from pagoda.models.architecture import Architecture
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig, QKNorm, read_decoder
from pagoda.models.decoder_layers import LlamaLayer
from pagoda.models.llama import Llama
from pagoda.models.naming import BARE, Naming
from pagoda.ops.declare import Activation
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor

_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class XIELU(Module):
    """https://arxiv.org/abs/2411.13010, with numbers that were trained: their softplus is what multiplies."""

    def __init__(self) -> None:
        self.alpha_p, self.alpha_n, self.beta, self.eps = (
            Parameter[float](Vector(1, is_number=True)) for _ in range(4)
        )

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        above, below = (math.log1p(math.exp(alpha.value)) for alpha in (self.alpha_p, self.alpha_n))
        beta = self.beta.value
        return ops.xielu(x, above, beta + below, beta, self.eps.value)


class XIELUMLP(PlainMLP):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.spec.hidden_size, config.spec.intermediate_size, Activation.IDENTITY)
        self.act_fn = XIELU()

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.down_proj(ops, self.act_fn(ops, self.up_proj(ops, x)))


class ApertusLayer(LlamaLayer):
    def __init__(self, config: DecoderConfig, index: int, rotary: Rotary) -> None:
        super().__init__(config, index, rotary)
        self.mlp = XIELUMLP(config)


def read(config: ConfigReader) -> DecoderConfig:
    config.choice("hidden_act", ("xielu",), "xielu")
    config = config.changed({"hidden_act": None}).with_defaults({"rms_norm_eps": 1e-5})
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.changed({"rope_parameters": _ROPE})
    bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, "apertus", default_theta=12e6, plain_mlp=True),
        layer=ApertusLayer,
        qk_norm=QKNorm.HEAD,
        qkv_bias=bias,
        attention_out_bias=bias,
    )


_TENSORS = (
    (r"\.input_layernorm\.", ".attention_layernorm."),
    (r"\.post_attention_layernorm\.", ".feedforward_layernorm."),
)

APERTUS = Architecture(
    name="apertus",
    title="Apertus",
    hf_names=("ApertusForCausalLM",),
    model=Llama,
    read=read,
    hf=(Naming(substitutions=_TENSORS), Naming(substitutions=BARE.substitutions + _TENSORS)),
)
