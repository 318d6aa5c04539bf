"""KVEventsConfig: whether and where changes of the prefix cache are published, with vLLM's names."""

import re
from dataclasses import dataclass
from typing import Annotated

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.setting import Setting

_ENDPOINT = re.compile(r"tcp://(\S+):(\d+)|(ipc|inproc)://\S+")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Events of the prefix cache for routers and other readers. They carry the tokens of prompts."""

    enable_kv_cache_events: Annotated[bool, Setting("Publish which blocks the prefix cache stores and removes.")] = (
        False
    )
    publisher: Annotated[
        str | None, Setting("How: zmq or null (not at all).", unset="zmq if enabled", words=("zmq", "null"))
    ] = None
    endpoint: Annotated[
        str,
        Setting(
            "ZeroMQ address of the events. A replica adds its number, from 0, to the port. The publisher listens on an "
            "address of this machine (127.0.0.1, [::1], *) and connects to any other; * is open to the network."
        ),
    ] = "tcp://127.0.0.1:5557"
    replay_endpoint: Annotated[
        str | None, Setting("Where readers ask for batches that they missed.", unset="there are no replays")
    ] = None
    buffer_steps: Annotated[int, Setting("Last batches that can be asked for, of at most 256 MiB.", at_least=1)] = (
        10_000
    )
    hwm: Annotated[int, Setting("Batches that may wait for a slow reader; others are lost to it.", at_least=1)] = (
        100_000
    )
    max_queue_size: Annotated[
        int,
        Setting(
            "Events that may wait to be published; if there are more, readers are told AllBlocksCleared.", at_least=1
        ),
    ] = 100_000
    topic: Annotated[str, Setting("First frame of each message.")] = ""

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def check(self) -> None:
        """Check the addresses, and that those who name one also publish. Raises ConfigError."""
        for name in ("endpoint", "replay_endpoint"):
            given = getattr(self, name)
            if given is not None and not _ENDPOINT.fullmatch(given):
                raise ConfigError(
                    f"kv_events_config.{name}={abbreviate(given)} must be an address such as tcp://127.0.0.1:5557, "
                    "tcp://*:5557 or ipc:///run/kv-events"
                )
        if not self.enable_kv_cache_events and self != KVEventsConfig(publisher=self.publisher):
            raise ConfigError("kv_events_config has no effect without enable_kv_cache_events: set that to true, too")


def endpoint_of(endpoint: str, replica: int) -> str:
    """Return the address that a replica, from 0, uses: another port, or another name."""
    if replica == 0:
        return endpoint
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or match[2] is None:
        return f"{endpoint}_dp{replica}"
    port = int(match[2])
    return f"tcp://{match[1]}:{port + replica if port else 0}"
