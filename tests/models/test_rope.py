"""Rotary tables against those of transformers, and the two ways that configs say them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagoda.layers.rope_config import RopeConfig, RopeType
from pagoda.loading.rotary_tables import build_rotary_tables
from pagoda.models.config_reader import ConfigReader, read_rope

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
