"""Rotary tables against those of transformers, and the two ways that configs say them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagoda.base.errors import ConfigError
from pagoda.kernels.rotary.reference import rotary
from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.loading.rotary_tables import build_rotary_tables
from pagoda.models.config_reader import ConfigReader, read_rope
from pagoda.models.decoder_config import read_decoder

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.5,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda parameters: parameters["rope_type"])
def test_tables_equal_transformers(parameters: dict[str, Any]):
    shape = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 8192}
    parameters = {"original_max_position_embeddings": 8192, "rope_theta": 5e5, **parameters}
    rope = read_rope(ConfigReader({**shape, "rope_parameters": parameters}, "config.json"))
    table = build_rotary_tables(rope, 128, 8192, torch.device("cpu"))
    reference = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=dict(parameters)))
    cos, sin = reference(torch.empty(0), torch.arange(8192).unsqueeze(0))
    for ours, theirs in ((table.cos, cos), (table.sin, sin)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs[0, :, :64], rtol=0, atol=2e-6)


def test_the_older_form_says_the_same():
    base = {"max_position_embeddings": 64, "rope_theta": 300.0}
    older = ConfigReader({**base, "rope_scaling": {"type": "linear", "factor": 2}}, "config.json")
    newer = ConfigReader({**base, "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}}, "c")
    assert read_rope(older) == read_rope(newer) == RopeConfig(RopeType.LINEAR, 300.0, factor=2.0)


@pytest.mark.parametrize(
    ("rope", "trained", "reach"),
    [
        (RopeConfig(), 2048, 2048),
        (RopeConfig(RopeType.DYNAMIC, factor=4.0), 2048, 2048),
        (RopeConfig(RopeType.LINEAR, factor=4.0), 2048, 8192),
        (RopeConfig(RopeType.LLAMA3, factor=8.0, original_max_position=8192), 131072, 131072),
        (RopeConfig(RopeType.YARN, factor=4.0, original_max_position=32768), 32768, 131072),
        (RopeConfig(RopeType.YARN, factor=4.0, original_max_position=32768), 131072, 131072),
    ],
    ids=str,
)
def test_how_far_a_rope_reaches(rope: RopeConfig, trained: int, reach: int):
    assert rope.max_position(trained) == reach


@pytest.mark.parametrize(
    ("theirs", "embedding", "rotated", "interleaved"),
    [
        (modeling_gpt_neox, modeling_gpt_neox.GPTNeoXRotaryEmbedding, 0.25, False),
        (modeling_gpt_neox, modeling_gpt_neox.GPTNeoXRotaryEmbedding, 0.75, False),
        (modeling_cohere, modeling_cohere.CohereRotaryEmbedding, 1.0, True),
        (modeling_glm, modeling_glm.GlmRotaryEmbedding, 0.5, True),
    ],
)
def test_heads_in_another_order_give_the_scores_of_transformers(
    theirs: Any, embedding: Any, rotated: float, interleaved: bool
):
    """Of heads that are turned in part, or in pairs of neighbours."""
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": rotated}
    shape: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 2, "max_position_embeddings": 64}
    rope = read_rope(ConfigReader({**shape, "rope_parameters": parameters}, "c"), rotated=1.0, interleaved=interleaved)
    order = rope.head_order(48)
    assert order is not None
    assert sorted(order) == list(range(48))
    q, k = torch.randn(2, 2, 20, 48, generator=torch.Generator().manual_seed(1))
    cos, sin = embedding(LlamaConfig(**shape, rope_parameters=parameters))(q, torch.arange(20).unsqueeze(0))
    wanted = [x[0] for x in theirs.apply_rotary_pos_emb(q.unsqueeze(0), k.unsqueeze(0), cos, sin)]
    tables = build_rotary_tables(rope, 48, 64, torch.device("cpu"))
    at = torch.arange(20, dtype=torch.int32)
    got = rotary(*(x[..., list(order)].transpose(0, 1) for x in (q, k)), at, tables.cos, tables.sin)
    got_q, got_k = (x.transpose(0, 1) for x in got)
    torch.testing.assert_close(got_q @ got_k.transpose(1, 2), wanted[0] @ wanted[1].transpose(1, 2), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("share", "words"), [(0.02, "turns 0 elements"), (0.21, "turns 3 elements"), (1.5, "at most 1")]
)
def test_a_share_that_cannot_be_turned_is_refused(share: float, words: str):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": 1}
    config = ConfigReader({**shape, "intermediate_size": 8, "vocab_size": 9, "partial_rotary_factor": share}, "c")
    with pytest.raises(ConfigError, match=words):
        read_decoder(config, "some", rotated=0.5)
    with pytest.raises(ConfigError, match="partial_rotary_factor = .* is not supported"):
        read_decoder(config, "some")
