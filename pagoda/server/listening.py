"""Bind the server's socket and check its certificate before anything slow, so that errors are reported at once."""

import contextlib
import errno
import fcntl
import logging
import os
import resource
import socket
import ssl
import stat
from importlib.metadata import version

from pagoda.base.errors import ConfigError
from pagoda.base.server_config import ServerConfig

logger = logging.getLogger("pagoda.server")

OWN_FILES = 256  # generous allowance for open files other than connections
_PORT = 8000
_OLLAMA_PORT = 11434
"""Where Ollama's clients look, so that they need no setting."""
SEND_TIMEOUT_S = 120
"""A connection is closed if what was sent to it is not acknowledged for so long."""


def listen(config: ServerConfig) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises ConfigError for an unusable address or certificate."""
    _check_certificate(config)
    _allow_files(config.server_limits.max_connections + OWN_FILES)
    if config.uds is not None:
        return _listen_on_file(config.uds)
    usual = _OLLAMA_PORT if config.ollama else _PORT
    return _bind(config, usual if config.port is None else config.port)


def listen_together(config: ServerConfig) -> list[socket.socket]:
    """Return such a socket for each API process; the system spreads connections over those that listen.

    A Unix socket cannot be bound several times: all processes accept from one.
    """
    first = listen(config)
    if config.uds is not None:
        return [first] * config.api_server_count
    with first:  # it has found out whether the port is free
        port = first.getsockname()[1]
        return [_bind(config, port, is_shared=True) for _ in range(config.api_server_count)]


def lock_port(config: ServerConfig, listener: socket.socket) -> socket.socket:
    """Return what keeps the port of `listener` from other servers of several processes, until it is closed.

    Two that begin to listen in the same instant would share it. An abstract name is free again when its process has
    ended, and belongs to the network namespace, as a port does. Raises ConfigError if another server has it.
    """
    lock = socket.socket(socket.AF_UNIX)
    if config.uds is None:
        host, port = listener.getsockname()[:2]
        try:
            lock.bind(f"\0pagoda:{host}:{port}")
        except OSError:
            lock.close()
            raise ConfigError(
                f"cannot listen on {host} port {port}: another server with --api-server-count has it; choose another "
                "with --host and --port"
            ) from None
    return lock


def check_free(config: ServerConfig, listener: socket.socket) -> None:
    """Raise ConfigError if another server has begun to listen on the port of `listener`, before this one does.

    The sockets of several processes would share it with any server of the same user.
    """
    if config.uds is None:
        _bind(config, listener.getsockname()[1]).close()


def announce(config: ServerConfig, listener: socket.socket) -> None:
    """Log that clients are served, and where."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    where = f"{host}:{listener.getsockname()[1]}" if config.uds is None else f"unix:{config.uds}:"
    url = f"{'https' if config.tls.ssl_certfile else 'http'}://{where}{config.root_path}"
    logger.info("pagoda %s ready at %s  (chat at %s/, docs at %s/docs)", version("pagoda-llm"), url, url, url)


def _bind(config: ServerConfig, port: int, is_shared: bool = False) -> socket.socket:
    """Return a socket that is bound to a port.   is_shared: with others of this user."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit it. A client that does not read, or has vanished, would count against the limits
    # forever.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SEND_TIMEOUT_S * 1000)
    try:
        listener.bind((config.host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"cannot listen on {config.host} port {port}: {why}; choose another with --host and --port"
        ) from None
    return listener


class _FileListener(socket.socket):
    """A Unix socket, with a lock of its path until it is closed: before it listens, it looks like one left over.

    Both files are removed when it is closed.
    """

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._at_end = contextlib.ExitStack()

    def take(self, path: str) -> None:
        """Bind it, in place of what an ended server left. Raises OSError if another server has the path."""
        file = self._at_end.enter_context(open(f"{path}.lock", "a"))  # noqa: SIM115
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:  # else its owner has removed it meanwhile
                self._at_end.callback(_remove, f"{path}.lock")
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                    if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED:
                        os.unlink(path)
                self.bind(path)
                self._at_end.callback(_remove, path)
                return
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    def close(self) -> None:
        super().close()
        self._at_end.close()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _listen_on_file(path: str) -> socket.socket:
    listener = _FileListener()
    try:
        listener.take(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from None
    return listener


def _check_certificate(config: ServerConfig) -> None:
    tls = config.tls
    if tls.ssl_certfile is None:
        if tls.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {tls.ssl_certfile}, --ssl-keyfile {tls.ssl_keyfile or tls.ssl_certfile}"
        raise ConfigError(f"{files}: no usable certificate and key ({error.strerror or error})") from None


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files as far as the system allows.

    At the limit, connections could be neither accepted nor refused, and a dead engine could not be restarted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < count:
        logger.warning(
            "only %d files may be open (ulimit -n): max_connections above %d has no effect", hard, hard - OWN_FILES
        )
