"""An engine process that forgets no request, nor a MiB it took for it: `python -m tests.hostile.leaking_engine`."""

from pagoda.core.request import Request
from pagoda.engine.engine_core import EngineCore
from tests.server.watched_engine import main_watched

_LEAKED: list[tuple[Request, bytes]] = []
_add_request = EngineCore.add_request


def add_request(core: EngineCore, request: Request) -> None:
    _LEAKED.append((request, b"x" * 2**20))
    _add_request(core, request)


if __name__ == "__main__":
    EngineCore.add_request = add_request  # type: ignore[assignment,method-assign]
    main_watched()
