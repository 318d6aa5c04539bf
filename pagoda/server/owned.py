"""Owned: what the processes that serve one port have once, besides admission and adapters."""

from pagoda.base.server_config import ServerConfig
from pagoda.engine.clients.calls import Services, services_of
from pagoda.server.batches.service import FileService
from pagoda.server.history_store import HistoryStore
from pagoda.server.stored.service import StoreService


class Owned:
    """What was sampled, and what is stored. A process that is alone has it itself, of several their parent."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._history = HistoryStore.of(config)
        self._stored = StoreService(config.responses_file)
        self._files = FileService(None if config.responses_file is None else f"{config.responses_file}.files")

    @property
    def services(self) -> Services:
        """What the processes may call."""
        return services_of(self._history, self._stored, self._files)

    def end_client(self, client: int) -> None:
        """A process has gone."""
        self._stored.end_client(client)
        self._files.end_client(client)

    def close(self) -> None:
        """Write what waits to be written, and close both files."""
        self._stored.close()
        self._files.close()
        self._history.close()
