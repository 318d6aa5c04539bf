"""`pagoda serve`: the HTTP server over an engine process."""

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.server_config import ServerConfig
from pagoda.base.vllm_options import key_from
from pagoda.cli.console import ask_before_fetching
from pagoda.cli.options import engine_options, flag_of
from pagoda.cli.serve_models import model_configs
from pagoda.process.allocator import collecting_nothing, keep_buffers_apart
from pagoda.process.logs import configure_logging

logger = logging.getLogger("pagoda")


@engine_options(ServerConfig)
def serve(options: dict[str, object]) -> None:
    """Serve an OpenAI-compatible HTTP API.

    Until SIGTERM or Ctrl-C. Where neither the client nor the model says otherwise, temperature is 1.0, as from
    the OpenAI API.
    """
    try:
        from uvloop import run
    except ImportError:  # not on Windows, and not needed
        from asyncio import run  # type: ignore[assignment]
    configs = [with_vllms_key(with_key_file(one), os.environ) for one in model_configs(options)]
    for config in configs:
        ask_before_fetching(config.model)
    run(_serve(configs) if configs[0].server.api_server_count == 1 else _serve_together(configs[0]))


def with_key_file(config: EngineConfig) -> EngineConfig:
    """Return the settings with the keys of --api-key-file among the API keys. Raises ConfigError."""
    server = config.server
    if server.api_key_file is None:
        return config
    try:
        lines = Path(server.api_key_file).expanduser().read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {server.api_key_file} cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {server.api_key_file} has no key: write one per line")
    return replace(config, server=replace(server, api_keys=(*server.api_keys, *keys)))


def with_vllms_key(config: EngineConfig, environ: Mapping[str, str]) -> EngineConfig:
    """Return the settings with the key of VLLM_API_KEY, unless they have keys. Raises ConfigError; see `key_from`."""
    key, server = key_from(environ, flag_of), config.server
    if key is None or server.api_keys:
        return config
    return replace(config, server=replace(server, api_keys=(key,)))


def _prepare(config: EngineConfig, process: str) -> None:
    """Set up this process; warn of what is open to all. Raises ConfigError.   process: what its log calls it."""
    configure_logging(process, config.server.logs.log_level, config.server.logs.log_format)
    check_settings(config)
    if not config.server.is_local:
        if not config.server.api_keys:
            logger.warning(
                "anyone who can reach %s may use this server: set --api-key, or listen on 127.0.0.1", config.server.host
            )
        logger.info(
            "anyone who can reach %s, with a key or without, may send requests a byte at a time, which costs much: put "
            "a proxy in front that buffers them",
            config.server.host,
        )
    keep_buffers_apart(os.environ)
    # Until the server handles them, signals end this process at once, even inside a long call on another thread. The
    # processes that it has started notice that and exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


async def _serve_together(config: EngineConfig) -> None:
    """This process has the engine process, and starts those that serve HTTP."""
    _prepare(config, "server")
    from pagoda.server.api_group import serve_together

    await serve_together(config)


async def _serve(configs: list[EngineConfig]) -> None:
    """The engine processes start first; the web framework is imported while they load the models."""
    config = configs[0]
    _prepare(config, "api")
    for other in configs[1:]:
        check_settings(other)
    with ExitStack() as until_ready:
        until_ready.enter_context(collecting_nothing())
        from pagoda.server.listening import announce, listen
        from pagoda.server.running import running_engines

        def on_ready() -> None:
            until_ready.close()
            announce(config.server, listener)

        with listen(config.server) as listener:
            async with running_engines(configs) as state:
                from pagoda.server.app import serve as serve_http

                await serve_http(state, config.server, listener, on_ready)
