"""KV beyond the pool: blocks in files, found by their hashes, which outlive the pool and the server.

file_tier.py     FileTier: core's KVTier, with two threads per folder: one reads, one writes
records.py       Records: the files in a folder: checked when they are read, bounded in size, shared by several engines
host_folder.py   the folder of files in memory, which is removed when no engine uses it

A block's file is in a folder that is named by everything its bits depend on, by its hash, which begins with a secret
seed. Whatever goes wrong with a file costs the time to compute its tokens again, and nothing else.
"""

from pagoda.tier.file_tier import FileTier
from pagoda.tier.host_folder import bytes_in, hold
from pagoda.tier.records import Records, hash_seed, read_seed, tiers_seed

__all__ = ["FileTier", "Records", "bytes_in", "hash_seed", "hold", "read_seed", "tiers_seed"]
