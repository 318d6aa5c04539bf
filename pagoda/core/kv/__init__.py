"""The KV cache: KVCacheManager, the values it returns, and pure sizing functions.

Nothing else in this folder is imported from outside.
"""

from pagoda.core.kv.block_tables import NO_MOVES, StepMoves
from pagoda.core.kv.manager import AdmissionResult, CachedPrefix, KVCacheManager
from pagoda.core.kv.sizing import KVSizing, blocks_for, longest_request

__all__ = [
    "NO_MOVES",
    "AdmissionResult",
    "CachedPrefix",
    "KVCacheManager",
    "KVSizing",
    "StepMoves",
    "blocks_for",
    "longest_request",
]
