"""Rows whose block tables begin alike read these blocks once on CPUs, with the bits of each row by itself."""

import ctypes
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.native.arguments import new_group
from pagoda.kernels.native_ops import NativeOps
from tests.kernels.paged import Geometry, make_metadata

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

GEOMETRIES = [
    Geometry(8, 2, 64, 16, BF16),
    Geometry(8, 2, 64, 16, BF16, int8_cache=True),
    Geometry(6, 2, 48, 24, F32),
    Geometry(4, 4, 32, 8, F16),
    Geometry(4, 1, 80, 128, F16, int8_cache=True),
    Geometry(64, 1, 16, 8, BF16),
    Geometry(20, 1, 16, 16, BF16, latent=64),
]


@dataclass
class Batch:
    """Rows of (context, new tokens), their blocks, and the last position that each query sees or None."""

    lens: list[tuple[int, int]]
    tables: list[list[int]]
    last_seen: list[int] | None


def random_batch(geometry: Geometry, chooser: random.Random) -> Batch:
    """Rows in any order that begin with one of a few families of blocks, each a branch of an earlier one at times."""
    blocks = list(range(1, 4000))
    chooser.shuffle(blocks)
    families: list[list[int]] = []
    for _ in range(chooser.randint(1, 3)):
        stem = families[-1][: chooser.randint(0, len(families[-1]))] if families and chooser.random() < 0.5 else []
        families.append(stem + [blocks.pop() for _ in range(900 // geometry.block_size)])
    lens: list[tuple[int, int]] = []
    tables: list[list[int]] = []
    seen: list[int] = []
    spans = chooser.random() < 0.2
    for _ in range(chooser.choice((2, 5, 20))):
        family, new = chooser.choice(families), chooser.choice((1, 1, 1, 1, 4, 70))
        context = chooser.choice((0, 3, 255, 256, 300, 511, 512, 513, 700, 800))
        size = -(-(context + new) // geometry.block_size)
        shared = chooser.choice((0, len(family), context // geometry.block_size))
        table = family[: min(shared, size)]
        tables.append(table + [blocks.pop() for _ in range(size - len(table))])
        lens.append((context, new))
        seen += [context + new - 1 if spans else context + i for i in range(new)]
    return Batch(lens, tables, seen if spans else None)


def metadata_of(geometry: Geometry, batch: Batch, rows: list[int]) -> AttentionMetadata:
    metadata = make_metadata(geometry, [batch.lens[row] for row in rows], [batch.tables[row] for row in rows])
    if batch.last_seen is None:
        return metadata
    firsts = [sum(new for _, new in batch.lens[:row]) for row in range(len(batch.lens))]
    seen = [batch.last_seen[firsts[row] + i] for row in rows for i in range(batch.lens[row][1])]
    return replace(metadata, last_seen=torch.tensor(seen, dtype=torch.int32))


def filled(geometry: Geometry) -> KVLayer:
    cache = geometry.new_cache(4000)
    generator = torch.Generator().manual_seed(0)
    for pages, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        if scales is None:
            pages.copy_(torch.randn(pages.shape, generator=generator))
        else:
            pages.copy_(torch.randint(-127, 128, pages.shape, generator=generator))
            scales.copy_(torch.rand(scales.shape, generator=generator) / 100)
    return cache


def attend(
    ops: Any, geometry: Geometry, q: torch.Tensor, cache: KVLayer, metadata: AttentionMetadata, kind: str
) -> torch.Tensor:
    heads, scale = geometry.num_heads, 0.2
    if geometry.latent:
        latent, rope = q.split((geometry.latent, geometry.head_dim), dim=-1)
        return ops.latent_attention(latent.contiguous(), rope.contiguous(), cache, metadata, scale)
    bias = torch.linspace(-1, 1, 65).repeat(heads, 1) if kind == "bias" else None
    sinks = torch.linspace(-1, 4, heads).to(q.dtype) if kind == "sinks" else None
    window, softcap = 500 * (kind == "window"), 30.0 * (kind == "softcap")
    return ops.attention(q, cache, metadata, scale, window, softcap, bias, 0, sinks)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_same_bits_as_alone(native: NativeOps, geometry: Geometry) -> None:
    chooser, cache = random.Random(str(geometry)), filled(geometry)
    for kind in ["plain", "plain", "sinks", "softcap", "window", "bias"][: 2 if geometry.latent else 6]:
        batch = random_batch(geometry, chooser)
        news = [new for _, new in batch.lens]
        q = torch.randn(sum(news), geometry.num_heads, geometry.latent + geometry.head_dim).to(geometry.dtype)
        whole = metadata_of(geometry, batch, list(range(len(news))))
        alone = [
            attend(native, geometry, of_row, cache, metadata_of(geometry, batch, [row]), kind)
            for row, of_row in enumerate(q.split(news))
        ]
        for threads in (1, 3, 64):
            ops = NativeOps(native.library, threads)
            assert torch.equal(attend(ops, geometry, q, cache, whole, kind), torch.cat(alone)), (kind, threads, batch)


def positions_read(native: NativeOps, metadata: AttentionMetadata, group: int) -> int:
    return native.library["attention_positions"](ctypes.byref(new_group(metadata)), group)


def test_a_prefix_is_read_once_for_a_tile_of_rows(native: NativeOps) -> None:
    """By 48 query vectors: 12 rows of 4 heads each. Where the rows are in the batch does not matter."""
    geometry = Geometry(8, 2, 64, 16, BF16)
    system = [list(range(1, 65)), list(range(101, 165))]
    own = iter(range(1000, 2000))
    lens = [(1030, 1)] * 24
    alike = make_metadata(geometry, lens, [[*system[0], next(own)] for _ in lens])
    assert positions_read(native, alike, 4) == 2 * 1024 + 24 * 7
    assert positions_read(native, alike, 48) == 24 * 1031
    mixed = make_metadata(geometry, lens, [[*system[row % 2], next(own)] for row in range(24)])
    assert positions_read(native, mixed, 4) == 2 * 1024 + 24 * 7
    apart = make_metadata(geometry, lens, [[next(own) for _ in range(65)] for _ in lens[:8]] + [[1] * 65] * 16)
    assert positions_read(native, apart, 4) == 8 * 1031 + 2 * 1024 + 16 * 7


def test_a_long_prefix_is_not_given_up_for_a_short_one(native: NativeOps) -> None:
    """Two pairs of 900 positions that have 256 in common: more would be read if all four were computed over those."""
    geometry = Geometry(8, 2, 64, 16, BF16)
    stem, own = list(range(1, 17)), iter(range(100, 1000))
    branches = [[*stem, *(next(own) for _ in range(48))] for _ in range(2)]
    batch = make_metadata(geometry, [(1024, 1)] * 4, [[*branches[row // 2], next(own)] for row in range(4)])
    assert positions_read(native, batch, 4) == 2 * 1024 + 4
