"""Attention backends: attention over the cache by a library, in place of our own Triton kernels.

A backend is one file with one class, and a line in `_BACKENDS`. Its library is optional and imported when it is chosen.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from pagoda.base.errors import ConfigError
from pagoda.base.registry import Registry
from pagoda.kernels.attention.backend_memory import BackendMemory
from pagoda.kernels.attention.flashinfer_attention import FlashInferAttention
from pagoda.kernels.attention.paged_op import PagedAttentionOp
from pagoda.kernels.attention.varlen_attention import VarlenAttention


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model and its settings need of attention over the cache.

    head_dims: head sizes of its layers.   has_softcap: scores are capped.   dtype: of queries.   kv_dtype: of pages,
    torch.int8 and torch.float8_e4m3fn with scales.
    """

    head_dims: frozenset[int]
    has_softcap: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype


class AttentionBackend(Protocol):
    """Attention over the cache.

    head_dims: head sizes that it has; empty: all multiples of 8 up to 256.   has_softcap: it can cap scores.
    memory: what it takes of a GPU.
    All have sliding windows and compute in bfloat16 and float16, with pages of the same type.
    """

    head_dims: ClassVar[frozenset[int]]
    has_softcap: ClassVar[bool]
    memory: ClassVar[BackendMemory]

    def __init__(self, own: PagedAttentionOp, device: torch.device) -> None:
        """own: our kernels, for steps that it leaves to them. Raises ConfigError if its library or GPU is not there."""
        ...

    @property
    def attention(self) -> PagedAttentionOp:
        """`attention` of the op table."""
        ...


_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention_backend", {"flashinfer": FlashInferAttention, "varlen": VarlenAttention}
)


def make_backend(name: str, own: PagedAttentionOp, device: torch.device) -> AttentionBackend:
    """Return the backend called `name`: see AttentionBackend. Raises ConfigError if it is unknown, too."""
    return _BACKENDS[name](own, device)


def memory_of(name: str) -> BackendMemory:
    """Return what the backend called `name` takes of a GPU; nothing for "auto"."""
    return BackendMemory() if name == "auto" else _BACKENDS[name].memory


def check_needs(name: str, needs: AttentionNeeds) -> None:
    """Raise ConfigError, with what to do, if a model needs what the backend called `name` does not have."""
    if name == "auto":
        return
    for lack in _lacks(_BACKENDS[name], needs):
        raise ConfigError(f"attention_backend={name!r} has no {lack}; take attention_backend='auto'")


def _lacks(backend: type[AttentionBackend], needs: AttentionNeeds) -> list[str]:
    """Return what of the needs the backend does not have, as nouns."""
    lacks: list[str] = []
    if needs.has_softcap and not backend.has_softcap:
        lacks.append("soft cap of attention scores, which this model has")
    for dim in sorted(needs.head_dims):
        if dim not in backend.head_dims if backend.head_dims else dim % 8 or dim > 256:
            allowed = ", ".join(map(str, sorted(backend.head_dims))) or "multiples of 8 up to 256"
            lacks.append(f"heads of size {dim}, which this model has (it has {allowed})")
    if needs.dtype not in (torch.bfloat16, torch.float16):
        lacks.append(f"kernels for {_name(needs.dtype)} (bfloat16 and float16 are possible: dtype)")
    elif needs.kv_dtype != needs.dtype:
        lacks.append(
            f"KV cache of {_name(needs.kv_dtype)} next to queries of {_name(needs.dtype)}, or leave kv_cache_dtype out"
        )
    return lacks


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
