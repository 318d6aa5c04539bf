"""Shards of a matrix: together they are the matrix, and none divides a head or a quantisation group."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import codes_of
from pagoda.layers.attention import Attention, Heads
from pagoda.layers.mlp import GatedMLP
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Axis, Matrix, Part
from pagoda.layers.rope_config import RopeConfig
from pagoda.layers.rotary import Rotary
from pagoda.layers.sharding import shard_of
from pagoda.loading.model_config import read_architecture, read_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.pieces import weight_pieces
from pagoda.loading.weights import open_weights
from pagoda.ops.declare import Activation
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import make_model, save


def attention(num_heads: int, num_kv_heads: int, dim: int = 64) -> tuple[Matrix, Matrix]:
    layer = Attention(256, Heads(num_heads, num_kv_heads, dim), Rotary(RopeConfig(), dim))
    assert layer.o_proj is not None
    qkv, out = layer.qkv.weight.declared, layer.o_proj.weight.declared
    assert isinstance(qkv, Matrix)
    assert isinstance(out, Matrix)
    return qkv, out


def mlp(inner_size: int) -> tuple[Matrix, Matrix]:
    layer = GatedMLP(256, inner_size, Activation.SILU, bias=True)
    gate_up, down = layer.gate_up.weight.declared, layer.down_proj.weight.declared
    assert isinstance(gate_up, Matrix)
    assert isinstance(down, Matrix)
    return gate_up, down


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(12, 12, 4), (12, 4, 2), (12, 4, 4), (32, 8, 8)])
def test_heads_are_divided_whole(heads: int, kv_heads: int, ranks: int) -> None:
    qkv, out = attention(heads, kv_heads)
    shards = [shard_of(qkv, rank, ranks) for rank in range(ranks)]
    for at, part in enumerate(qkv.parts):
        assert [row for shard in shards for row in shard.rows[at]] == list(range(part.rows))
        assert all(edge % 64 == 0 for shard in shards for edge in (shard.rows[at].start, shard.rows[at].stop))
    for rank, shard in enumerate(shards):
        assert shard_of(out, rank, ranks, group=32).columns == shard.rows[0]  # what a rank's q gives, its o_proj takes
        assert shard.columns == range(256)


def test_ranks_share_kv_heads_if_there_are_fewer() -> None:
    qkv, _ = attention(16, 2)
    shards = [shard_of(qkv, rank, 8) for rank in range(8)]
    assert [shard.rows[0].start // 64 for shard in shards] == [0, 2, 4, 6, 8, 10, 12, 14]
    for at in (1, 2):
        assert [shard.rows[at] for shard in shards] == [range(64)] * 4 + [range(64, 128)] * 4


@pytest.mark.parametrize("group", [1, 32, 64, 256])
@pytest.mark.parametrize(("inner", "ranks"), [(1536, 2), (1536, 3), (11008, 4), (1000, 3)])
def test_an_mlps_inner_dimension_is_divided_at_groups(inner: int, ranks: int, group: int) -> None:
    gate_up, down = mlp(inner)
    columns = [shard_of(down, rank, ranks, group).columns for rank in range(ranks)]
    assert [column for share in columns for column in share] == list(range(inner))
    assert all(share.start % group == 0 and (share.stop % group == 0 or share.stop == inner) for share in columns)
    sizes = [len(share) for share in columns]
    assert max(sizes) - min(sizes) <= 2 * group
    for rank, share in enumerate(columns):
        shard = shard_of(gate_up, rank, ranks, group)
        assert shard.rows == (share, share)
        assert shard.bias
        assert shard_of(down, rank, ranks, group).bias == (rank == 0)  # the ranks' outputs are added up


def test_what_cannot_be_divided_is_refused() -> None:
    qkv, out = attention(9, 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide the 9 heads of q_proj"):
        shard_of(qkv, 0, 2)
    with pytest.raises(ConfigError, match=r"cut the quantisation groups of 256 .*\(192 columns per rank\)"):
        shard_of(out, 0, 3, group=256)
    with pytest.raises(ConfigError, match="more than the 2 groups of 64"):
        shard_of(mlp(128)[1], 0, 3, group=64)


def test_what_is_not_divided_is_whole() -> None:
    matrix = Matrix((Part("", 10),), 7, bias=True)
    assert shard_of(matrix, 3, 4) == shard_of(matrix, 0, 1)
    assert shard_of(Matrix((Part("", 10),), 7, shard=Axis.OUT), 0, 1).rows == (range(10),)


@pytest.fixture(params=["safetensors", Kind.F16, Kind.Q8_0, Kind.Q4_1], ids=str)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> ModelFiles:
    model = make_model("qwen3")
    if request.param == "safetensors":
        return identify(save(model, tmp_path))
    write_gguf(model, tmp_path / "model.gguf", request.param)
    return identify(tmp_path / "model.gguf")


def test_a_shard_is_read_alone(files: ModelFiles) -> None:
    """Regions of a stored tensor are what slices of the whole tensor are, as values and as codes."""
    architecture = read_architecture(files)[0]
    naming = architecture.gguf if files.format == "gguf" else architecture.hf[0]
    weights = open_weights(files)
    num_divided = 0
    for path, parameter in parameters(read_model(files)):
        matrix = parameter.declared
        if not isinstance(matrix, Matrix) or matrix.shard is None or matrix.tied:
            continue
        for piece, whole in zip(
            weight_pieces(naming, path, matrix, shard_of(matrix, 1, 2, 32)),
            weight_pieces(naming, path, matrix, shard_of(matrix, 0, 1)),
            strict=True,
        ):
            expected, got = torch.empty(whole.region.shape), torch.empty(piece.region.shape)
            weights.read_into(whole.name, expected, whole.region)
            weights.read_into(piece.name, got, piece.region)
            assert piece.region.columns is not None
            rows = slice(piece.region.rows.start, piece.region.rows.stop)
            columns = slice(piece.region.columns.start, piece.region.columns.stop)
            assert torch.equal(got, expected[rows, columns])
            codes, all_codes = (weights.read_codes(each.name, each.region) for each in (piece, whole))
            if codes is not None and all_codes is not None:
                assert torch.equal(codes_of(codes).dequantize(), codes_of(all_codes).dequantize()[rows, columns])
            num_divided += got.numel() < expected.numel()
    assert num_divided > 10


def test_a_region_that_cuts_blocks_is_refused(tmp_path: Path) -> None:
    write_gguf(make_model("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    files = identify(tmp_path / "model.gguf")
    matrix = Matrix((Part("", 96),), 160, shard=Axis.IN)
    path = "model.layers.0.mlp.down_proj.weight"
    piece = next(weight_pieces(read_architecture(files)[0].gguf, path, matrix, shard_of(matrix, 1, 2, group=8)))
    weights, out = open_weights(files), torch.empty(piece.region.shape)
    with pytest.raises(ConfigError, match="has Q8_0 blocks of 32 values, which columns 80 to 160 cut"):
        weights.read_into(piece.name, out, piece.region)
