"""The experts of a Gemma 4, next to the MLP in each layer: a router with a norm, and a factor of each expert."""

from dataclasses import replace

from pagoda.layers.linear import Linear
from pagoda.layers.mlp import ExpertsConfig, StackedExperts
from pagoda.layers.module import Module
from pagoda.layers.parameter import Parameter, Vector
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import MOST_EXPERTS, DecoderConfig
from pagoda.models.naming import MULTIMODAL
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class Gemma4Experts(Module):
    """The sum of a normed MLP's output and that of the experts, which compute from the stream that the MLP normed."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        size = config.spec.hidden_size
        self.scale = Parameter[Tensor](Vector(size))
        self.proj = Linear(size, experts.num_experts, quantizable=False)
        self.per_expert_scale = Parameter[Tensor](Vector(experts.num_experts, is_float32=True))
        self.pre_feedforward_layernorm_2 = config.norm()
        self.experts = StackedExperts(size, experts, config.activation)
        self.post_feedforward_layernorm_1 = config.norm()
        self.post_feedforward_layernorm_2 = config.norm()
        self.config, self.norm_eps, self.logit_scale = experts, config.norm_eps, size**-0.5

    def __call__(self, ops: ForwardOps, mlp: Tensor, stream: Tensor) -> Tensor:
        """mlp, stream [T, hidden] -> the same shape."""
        config = self.config
        routed = ops.rms_norm(stream, self.scale.value, self.norm_eps)
        logits = ops.scale(ops.logits(routed, self.proj.weight.value), self.logit_scale)
        chosen = ops.route(logits, config.top_k, config.renormalize, factors=self.per_expert_scale.value)
        y = self.experts(ops, self.pre_feedforward_layernorm_2(ops, stream), chosen)
        return ops.add(self.post_feedforward_layernorm_1(ops, mlp), self.post_feedforward_layernorm_2(ops, y))


def read_gemma4_experts(config: ConfigReader) -> ExpertsConfig | None:
    """Read the experts, None where there are none. Raises ConfigError."""
    if not config.flag("enable_moe_block", False):
        return None
    num_experts, top_k = config.integer("num_experts", most=MOST_EXPERTS), config.integer("top_k_experts")
    if top_k > num_experts:
        raise config.wrong("top_k_experts", f"at most num_experts = {num_experts}")
    return ExpertsConfig(num_experts, top_k, config.integer("moe_intermediate_size"), renormalize=True)


_NAMES = (
    (r"\.moe\.(scale|per_expert_scale)$", r".router.\1"),
    (r"\.moe\.proj\.", ".router.proj."),
    (r"\.moe\.experts\.(\d+)\.(gate|up)_proj\.weight$", r".experts.gate_up_proj[\1]"),
    (r"\.moe\.experts\.(\d+)\.down_proj\.weight$", r".experts.down_proj[\1]"),
    (r"\.moe\.", "."),
)
NAMINGS = tuple(replace(naming, substitutions=(*_NAMES, *naming.substitutions)) for naming in MULTIMODAL)
