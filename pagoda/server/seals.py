"""Seals: sampled messages that clients keep and send back, unread and unchanged, in fields of their API.

A seal is base64 of a version, the key of the prompt that the message answered, a nonce and the encrypted message. It is
bound to its owner (an API key, a model and its tokenizer) and to that prompt.
"""

import base64
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from pagoda.base.cache_home import cache_home
from pagoda.engine.inputs.sampled_messages import KEY_BYTES, SampledMessage

logger = logging.getLogger("pagoda.server")

_VERSION = b"\x01"
_NONCE_BYTES = 12
_SECRET_BYTES = 32
_HEADER_CHARS = 24
"""Of base64, in which the version and the key are."""
_SECRET_FILE = "history.key"


class Sealer:
    """Seals messages and opens them.   secret: of the server.   max_chars: of a seal; longer ones are not opened."""

    def __init__(self, secret: bytes, max_chars: int) -> None:
        self._cipher = ChaCha20Poly1305(derived(secret, "seals"))
        self._max_chars = max_chars

    def seal(self, owner: str, key: bytes, message: SampledMessage) -> str:
        """Return a sealed message; "" for one that would be too long."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        data = self._cipher.encrypt(nonce, msgspec.msgpack.encode(message), owner.encode() + key)
        sealed = base64.b64encode(_VERSION + key + nonce + data).decode()
        return sealed if len(sealed) <= self._max_chars else ""

    def key_of(self, sealed: str) -> bytes | None:
        """Return the key that a seal names; None if it is not a seal. Looks at its beginning and its length alone."""
        if not _HEADER_CHARS < len(sealed) <= self._max_chars:
            return None
        with contextlib.suppress(ValueError):
            header = base64.b64decode(sealed[:_HEADER_CHARS], validate=True)
            if header.startswith(_VERSION):
                return header[1 : 1 + KEY_BYTES]
        return None

    def open(self, owner: str, key: bytes, sealed: str) -> SampledMessage | None:
        """Return the message in a seal whose key that is; None if it was changed, or is not this owner's."""
        with contextlib.suppress(ValueError, InvalidTag, msgspec.DecodeError):
            data = base64.b64decode(sealed, validate=True)[1 + KEY_BYTES :]
            nonce, data = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            return msgspec.msgpack.decode(self._cipher.decrypt(nonce, data, owner.encode() + key), type=SampledMessage)
        return None


def derived(secret: bytes, purpose: str) -> bytes:
    """Return a secret for one purpose."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


def server_secret(otherwise: bytes) -> bytes:
    """Return the secret of this user's servers, from a file that is made if necessary.

    otherwise: the secret where there can be no file: seals then last as long as the server.
    """
    path = cache_home() / _SECRET_FILE
    try:
        return _read_secret(path) or _make_secret(path)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used (%s): seals of this server are not opened by the next", path, error)
        return derived(otherwise, "server")


def _read_secret(path: Path) -> bytes | None:
    """Return the secret in a file; None without one. Raises ValueError for a file that is not this user's alone."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(_SECRET_BYTES + 1)
    except FileNotFoundError:
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError("others could read it; remove it, or make it yours with mode 600")
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"it has {len(secret)} bytes, expected {_SECRET_BYTES}; remove it")
    return secret


def _make_secret(path: Path) -> bytes:
    """Make the file, whole, unless another process does meanwhile; return what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 600
    try:
        with os.fdopen(number, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
    secret = _read_secret(path)
    if secret is None:
        raise ValueError("it was removed at once")
    return secret
