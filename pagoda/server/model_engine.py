"""ModelEngine: the settings of one served model, and the way to the process that runs it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pagoda.base.config import EngineConfig
from pagoda.engine.clients.remote_client import EngineClient
from pagoda.engine.wire import EngineSizes


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """A model and its engine, which starts.   started: waits for that."""

    config: EngineConfig
    client: EngineClient
    started: Callable[[], Awaitable[EngineSizes]]
