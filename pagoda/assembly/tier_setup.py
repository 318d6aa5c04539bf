"""The tier of an engine, as the setting `kv_tier` says."""

import dataclasses
from pathlib import Path

from pagoda.assembly.engine_setup import EngineSetup
from pagoda.assembly.identity import root_of_blocks
from pagoda.base.config import EngineConfig
from pagoda.base.kv_tier import read_kv_tier
from pagoda.tier import DiskTier, Records, tiers_seed


def with_tiers_seed(config: EngineConfig) -> EngineConfig:
    """Return the settings with the seed of the tier's folder, by which its blocks are found, unless they have one."""
    return dataclasses.replace(config, debug=dataclasses.replace(config.debug, prefix_hash_seed=tiers_seed(config)))


def open_tier(setup: EngineSetup) -> DiskTier | None:
    """Return the tier, which reads its folder from now on; None if the settings ask for none.

    Raises ConfigError if the folder cannot be used.
    """
    if setup.config.cache.kv_tier is None:
        return None
    space = read_kv_tier(setup.config.cache.kv_tier)
    return DiskTier(Records(Path(space.path), root_of_blocks(setup), space.max_bytes))
