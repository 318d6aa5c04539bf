"""What the parts of a server share when it starts."""

from pathlib import Path

from pagoda.base.config import EngineConfig
from pagoda.server.peers import Peers
from pagoda.server.state import _salt_secret


def test_salts_last_as_long_as_the_folder_of_a_tier(tmp_path: Path) -> None:
    """Else blocks of callers with API keys would not be found by a later server."""
    config, other = (EngineConfig.from_options(kv_tier=f"disk={tmp_path}/{name}:1GiB") for name in "ab")
    assert _salt_secret(config, Peers()) == _salt_secret(config, Peers())
    assert _salt_secret(config, Peers()) != _salt_secret(other, Peers())
    assert _salt_secret(EngineConfig(), Peers()) != _salt_secret(EngineConfig(), Peers())
