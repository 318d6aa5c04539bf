"""From a tree's paths to the names in a checkpoint."""

import pytest

from pagoda.base.errors import ConfigError
from pagoda.layers.parameter import Matrix, Part
from pagoda.layers.sharding import shard_of
from pagoda.loading.pieces import weight_pieces
from pagoda.models.naming import HF, Naming, StoredTensor, gguf_naming


def test_transformers_names_are_the_paths() -> None:
    assert HF.find("model.layers.3.self_attn.q_proj.weight") == StoredTensor("model.layers.3.self_attn.q_proj.weight")


def test_substitutions_apply_in_order() -> None:
    naming = Naming(substitutions=((r"^model\.", "language_model.model."), (r"\.mlp\.", ".ffn.")))
    assert naming.find("model.layers.3.mlp.up_proj.bias").name == "language_model.model.layers.3.ffn.up_proj.bias"
    assert naming.find("lm_head.weight").name == "lm_head.weight"


def test_llama_cpp_has_a_table() -> None:
    naming = gguf_naming({"post_attention_layernorm": "post_attention_norm"})
    assert naming.find("model.embed_tokens.weight") == StoredTensor("token_embd.weight")
    assert naming.find("model.layers.12.self_attn.q_proj.bias") == StoredTensor("blk.12.attn_q.bias")
    assert naming.find("model.layers.0.post_attention_layernorm.weight").name == "blk.0.post_attention_norm.weight"
    with pytest.raises(ConfigError, match=r"have no name for 'model.layers.0.mamba.weight'"):
        naming.find("model.layers.0.mamba.weight")


def test_parts_that_a_checkpoint_stores_as_one_tensor_are_its_rows() -> None:
    """Phi-3's way: qkv_proj holds q, k and v."""
    matrix = Matrix((Part("qkv_proj", 96), Part("qkv_proj", 32), Part("qkv_proj", 32)), 64)
    path = "model.layers.1.self_attn.qkv.weight"
    pieces = list(weight_pieces(HF, path, matrix, shard_of(matrix, 0, 1)))
    assert {piece.name for piece in pieces} == {"model.layers.1.self_attn.qkv_proj.weight"}
    assert {piece.shape for piece in pieces} == {(160, 64)}
    assert [piece.region.rows for piece in pieces] == [range(96), range(96, 128), range(128, 160)]
