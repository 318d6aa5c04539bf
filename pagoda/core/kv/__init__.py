"""The KV cache: which blocks hold the keys and values of which tokens.

manager.py        KVCacheManager, which the scheduler asks: admission, and what concerns several of its parts
block_tables.py   BlockTables: gives blocks to rows, shares them (copy-on-write), frees what windows have left
prefix_cache.py   PrefixCache: hashes of full blocks, and the blocks found by them
transfers.py      Transfers: blocks that a tier beyond the pools loads, or is given to keep
host_tier.py      HostTier: KV of swapped requests, in host memory
block_pool.py     BlockPools: reference counts and free blocks of one memory tier
sizing.py         KVGroupSpec: what layers ask for; how many blocks things need: pure functions

The manager answers for requests, its parts for rows and blocks.
Nothing else in this folder is imported from outside.
"""

from pagoda.core.kv.block_pool import BlockCounts
from pagoda.core.kv.block_tables import BlockTables
from pagoda.core.kv.manager import KVCacheManager
from pagoda.core.kv.prefix_cache import CachedPrefix, hashes_of_prompt
from pagoda.core.kv.sizing import (
    STATE_WINDOW,
    KVGroupKind,
    KVGroupSpec,
    KVShape,
    KVSizing,
    by_pool,
    exceeds,
    layers_per_block,
    prefix_group,
)
from pagoda.core.kv.transfers import FilledBlock, KVTier, Load, TierChange

__all__ = [
    "STATE_WINDOW",
    "BlockCounts",
    "BlockTables",
    "CachedPrefix",
    "FilledBlock",
    "KVCacheManager",
    "KVGroupKind",
    "KVGroupSpec",
    "KVShape",
    "KVSizing",
    "KVTier",
    "Load",
    "TierChange",
    "by_pool",
    "exceeds",
    "hashes_of_prompt",
    "layers_per_block",
    "prefix_group",
]
