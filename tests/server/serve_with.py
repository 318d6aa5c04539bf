"""`pagoda serve` with another engine process: `python -m tests.server.serve_with MODULE serve FLAGS...`

Pauses between engines that are of no use are short, so that a server gives up in seconds.
"""

import sys
from typing import Any

from pagoda.cli.main import main
from pagoda.engine.clients import supervisor
from pagoda.engine.clients.process_client import ProcessClient


def use_engine(module: str) -> None:
    """Start engine processes by `python -m MODULE` from now on."""
    plain = ProcessClient.__init__

    def with_module(client: ProcessClient, config: Any, step_timeout_s: float, _: str = "", *rest: Any) -> None:
        plain(client, config, step_timeout_s, module, *rest)

    ProcessClient.__init__ = with_module  # type: ignore[method-assign]


if __name__ == "__main__":
    use_engine(sys.argv.pop(1))
    supervisor.MAX_PAUSE_S = 0.1
    main()
