"""KV beyond the pool: blocks in files, found by their hashes, which outlive the pool and the server.

disk.py      DiskTier: core's KVTier, with a thread that reads and one that writes
records.py   Records: the files in a folder: checked when they are read, bounded in size, shared by several engines

A block's file is in a folder that is named by everything its bits depend on, by its hash, which begins with a secret
seed. Whatever goes wrong with a file costs the time to compute its tokens again, and nothing else.
"""

from pagoda.tier.disk import DiskTier
from pagoda.tier.records import Records, read_seed, tiers_seed

__all__ = ["DiskTier", "Records", "read_seed", "tiers_seed"]
