"""The definitions of the recurrent ops, put together to layers, against transformers' own of the families with them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet, torch_recurrent_gated_delta_rule

from pagoda.kernels.batch import KVLayer
from pagoda.kernels.reference_ops import ReferenceOps
from tests.kernels.paged import Geometry, make_metadata

TOKENS, HIDDEN, HEADS, GROUPS, STATE, HEAD = 45, 32, 8, 2, 16, 8
MAMBA = {
    "hidden_size": HIDDEN, "mamba_n_heads": HEADS, "mamba_n_groups": GROUPS, "mamba_d_state": STATE,
    "mamba_d_head": HEAD, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
OWN = {
    "hidden_size": HIDDEN, "num_heads": HEADS, "n_groups": GROUPS, "state_size": STATE, "head_dim": HEAD, "expand": 2,
    "chunk_size": 16,
}  # fmt: skip
NEMOTRON = {
    "hidden_size": HIDDEN, "mamba_num_heads": HEADS, "n_groups": GROUPS, "ssm_state_size": STATE,
    "mamba_head_dim": HEAD, "chunk_size": 16, "time_step_min": 0.3, "layers_block_type": ["mamba", "attention"],
}  # fmt: skip


def falcon_h1(norm_before_gate: bool) -> nn.Module:
    config = FalconH1Config(
        **MAMBA, mamba_d_ssm=HEADS * HEAD, mamba_rms_norm=True, mamba_norm_before_gate=norm_before_gate
    )
    layer = FalconH1Mixer(config, layer_idx=0)
    layer.mup_vector = compute_mup_vector(config)  # of ones: the whole model sets it
    return layer


MAMBA2: dict[str, Callable[[], nn.Module]] = {
    "mamba2": lambda: Mamba2Mixer(Mamba2Config(**OWN, time_step_limit=(0.1, 0.9)), layer_idx=0),
    "granite": lambda: GraniteMoeHybridMambaLayer(GraniteMoeHybridConfig(**MAMBA), layer_idx=0),
    "bamba": lambda: BambaMixer(BambaConfig(**MAMBA), layer_idx=0),
    "falcon_h1": lambda: falcon_h1(norm_before_gate=False),
    "falcon_h1, norm first": lambda: falcon_h1(norm_before_gate=True),
    "nemotron_h": lambda: NemotronHMamba2Mixer(NemotronHConfig(**NEMOTRON), layer_idx=0),
}
DELTA = {
    "hidden_size": HIDDEN, "linear_num_value_heads": HEADS, "linear_num_key_heads": GROUPS,
    "linear_key_head_dim": STATE, "linear_value_head_dim": HEAD, "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
}  # fmt: skip
GATED_DELTA: dict[str, Callable[[], nn.Module]] = {
    "qwen3_next": lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**DELTA), layer_idx=0),
    "qwen3_5": lambda: Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**DELTA), layer_idx=0),
}


def randomized(layer: nn.Module) -> nn.Module:
    """All parameters that matter differ from 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    return layer.eval()


def hidden_states() -> torch.Tensor:
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


class Convolved:
    """A layer's convolution and states, for one row in one step."""

    def __init__(self, convolution: nn.Conv1d, key_dim: int, value_dim: int) -> None:
        channels, _, taps = convolution.weight.shape
        self.weight, self.bias = convolution.weight.data[:, 0].T.contiguous(), convolution.bias
        self.states = KVLayer(torch.zeros(7, taps - 1, 1, channels), torch.zeros(7, HEADS, key_dim, value_dim))
        self.at = make_metadata(Geometry(block_size=8), [(0, TOKENS)], [list(range(1, 7))])

    def __call__(self, ops: ReferenceOps, x: torch.Tensor) -> torch.Tensor:
        return ops.short_conv(x.contiguous(), self.weight, self.bias, self.states, self.at, silu=True)


@torch.no_grad()
@pytest.mark.parametrize("family", MAMBA2)
def test_mamba2(reference: ReferenceOps, family: str) -> None:
    layer, x = randomized(MAMBA2[family]()), hidden_states()
    of_values = HEADS * HEAD
    z, xbc, dt = layer.in_proj(x)[0].split([of_values, of_values + 2 * GROUPS * STATE, HEADS], dim=1)
    conv = Convolved(layer.conv1d, STATE, HEAD)
    limits = layer.time_step_limit
    y = reference.mamba2(
        conv(reference, xbc), dt, -layer.A_log.exp(), layer.dt_bias, layer.D, conv.states, conv.at, *limits
    )  # fmt: skip
    y = reference.select_heads(y, 0, GROUPS, of_values // GROUPS)
    y = reference.gated_rms_norm(
        y, z, layer.norm.weight, layer.norm.variance_epsilon, family != "falcon_h1, norm first"
    )
    same(layer.out_proj(y), layer(x)[0])


@torch.no_grad()
@pytest.mark.parametrize("family", GATED_DELTA)
def test_gated_delta(reference: ReferenceOps, family: str) -> None:
    layer, x = randomized(GATED_DELTA[family]()), hidden_states()
    if family == "qwen3_next":
        found = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        q, k, v, z, b, a = (part[0].flatten(1) for part in found)
        qkv = torch.cat((q, k, v), 1)
    else:
        qkv, z, b, a = (part(x)[0] for part in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    conv = Convolved(layer.conv1d, STATE, HEAD)
    y = reference.gated_delta(conv(reference, qkv), a, b, -layer.A_log.exp(), layer.dt_bias, conv.states, conv.at)
    y = reference.gated_rms_norm(y.view(-1, HEADS, HEAD), z, layer.norm.weight, layer.norm.variance_epsilon, False)
    same(layer.out_proj(y), layer(x)[0])


@torch.no_grad()
def test_the_delta_rule_token_by_token(reference: ReferenceOps) -> None:
    """Against the recurrence of transformers, which decodes with it; it leaves the same state."""
    draws = [torch.randn(1, TOKENS, n, d) for n, d in ((GROUPS, STATE), (GROUPS, STATE), (HEADS, HEAD))]
    a, b = torch.randn(1, TOKENS, HEADS), torch.randn(1, TOKENS, HEADS)
    rate, dt_bias = -torch.randn(HEADS).exp(), torch.randn(HEADS)
    decay = rate * nn.functional.softplus(a + dt_bias)
    want, state = torch_recurrent_gated_delta_rule(
        *draws, decay, b.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    conv = Convolved(nn.Conv1d(8, 8, 4, groups=8), STATE, HEAD)
    x = torch.cat([part[0].flatten(1) for part in draws], 1)
    found = reference.gated_delta(x, a[0], b[0], rate, dt_bias, conv.states, conv.at)
    same(found, want[0].flatten(1))
    same(conv.states.v[6], state[0])
