"""The memory of prompt embeddings that a server admits. Does not import torch, for `pagoda plan`."""

from dataclasses import dataclass

from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.base.server_config import ServerLimits

_HOST_BYTES = 2 * DTYPE_BYTES["float32"]
"""Per element: the API process and the engine process both keep it until its request ends."""


@dataclass(frozen=True, slots=True)
class EmbedsMemory:
    """The most bytes that the embeddings of all admitted requests take.

    host: of the processes that hold the requests.   device: of the worker, in the compute type.
    """

    host: int = 0
    device: int = 0

    @property
    def total(self) -> int:
        return self.host + self.device


def embeds_memory(size: int, dtype: str, limits: ServerLimits) -> EmbedsMemory:
    """Return what the limits on request bodies and on tokens admit; nothing if neither is set.

    size: elements of an embedding.   dtype: the compute type.
    """
    bounds: list[int] = []
    if limits.max_queued_bytes:
        # The smallest element in a body has two bytes, and base64 makes four characters of three bytes.
        bounds.append(max(limits.max_queued_bytes, limits.max_body_bytes) * 3 // 8)
    if limits.max_queued_tokens:
        bounds.append(limits.max_queued_tokens * size)
    elements = min(bounds, default=0)
    return EmbedsMemory(elements * _HOST_BYTES, elements * DTYPE_BYTES[dtype])
