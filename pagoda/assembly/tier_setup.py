"""The tier of an engine, as the setting `kv_tier` says."""

import dataclasses
import logging
from contextlib import ExitStack
from pathlib import Path

from pagoda.assembly.engine_setup import EngineSetup
from pagoda.assembly.identity import root_of_blocks
from pagoda.base.abbreviate import human_bytes
from pagoda.base.config import EngineConfig
from pagoda.base.kv_tier import read_kv_tier
from pagoda.tier import FileTier, Records, hash_seed, hold

logger = logging.getLogger("pagoda")


def with_tiers_seed(config: EngineConfig) -> EngineConfig:
    """Return the settings with the seed of the tier's folder, by which its blocks are found, unless they have one."""
    return dataclasses.replace(config, debug=dataclasses.replace(config.debug, prefix_hash_seed=hash_seed(config)))


def open_tier(setup: EngineSetup) -> FileTier | None:
    """Return the tier, which reads its folders from now on; None if the settings ask for none.

    Raises ConfigError if a folder cannot be used.
    """
    if setup.config.cache.kv_tier is None:
        return None
    spaces, ends = read_kv_tier(setup.config.cache.kv_tier), ExitStack()
    for space in spaces:
        if space.tier == "host":
            ends.callback(hold(Path(space.path), space.max_bytes))
    root = root_of_blocks(setup)
    levels = [Records(Path(space.path), root, space.max_bytes, space.tier) for space in spaces]
    logger.info("KV tier: %s", ", ".join(f"{human_bytes(one.max_bytes)} in {one.path} ({one.tier})" for one in spaces))
    return FileTier(levels, ends.close)
