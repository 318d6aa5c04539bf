"""torch's `varlen_attn` over the paged cache (torch.nn.attention.varlen), computed by FlashAttention 3 or 4.

Its pages are [page_size, heads, size]: ours with two dimensions exchanged, which strides express. A block table needs
FlashAttention 3 on GPUs of compute capability 9, and 4 on those of 10; torch's own FlashAttention 2 takes none.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch.nn import attention as torch_attention

from pagoda.base.errors import ConfigError
from pagoda.kernels.attention.backend_memory import BackendMemory
from pagoda.kernels.attention.paged_op import PagedAttentionOp
from pagoda.kernels.batch import AttentionMetadata, KVLayer

_IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}
_INSTALL = {
    "FA3": "install FlashAttention 3 (module flash_attn_interface, folder hopper of its repository)",
    "FA4": "pip install --pre flash-attn-4",
}
_TRY_AUTO = "or take attention_backend='auto'"


class VarlenAttention:
    """See AttentionBackend. Steps are captured in CUDA graphs as with our own kernels."""

    head_dims: ClassVar[frozenset[int]] = frozenset()
    has_softcap: ClassVar[bool] = False
    memory: ClassVar[BackendMemory] = BackendMemory()

    def __init__(self, own: PagedAttentionOp, device: torch.device) -> None:
        """Make torch's FlashAttention the one for this GPU, in the whole process.

        Raises ConfigError if torch is too old, or FlashAttention is not installed or has no kernels for the GPU.
        """
        del own
        self._varlen_attn = _varlen_attn()
        major, minor = torch.cuda.get_device_capability(device)
        wanted = _IMPLEMENTATIONS.get(major)
        if wanted is None:
            raise ConfigError(
                f"attention_backend='varlen' needs a GPU of compute capability 9.0 or 10.0 (this one has "
                f"{major}.{minor}); take attention_backend='auto'"
            )
        if torch_attention.current_flash_attention_impl() == wanted:
            return
        try:
            torch_attention.activate_flash_attention_impl(wanted)
        except (ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"attention_backend='varlen' needs FlashAttention {wanted[2:]} on this GPU: {_INSTALL[wanted]}, "
                f"{_TRY_AUTO} ({error})"
            ) from error

    def attention(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """See reference.attention."""
        assert not softcap, "refused at the start"
        num_tokens, num_heads, head_dim = q.shape
        out = self._varlen_attn(
            q,
            cache.k.transpose(1, 2),
            cache.v.transpose(1, 2),
            metadata.query_start,
            None,
            metadata.max_query_len,
            metadata.max_seq_len,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),  # to the left without the query itself; 0: causal
            enable_gqa=num_heads != cache.k.shape[1],
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
        )
        return out.reshape(num_tokens, num_heads * head_dim)


def _varlen_attn() -> Any:
    """Return torch's function. Raises ConfigError if it takes no block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None
    if varlen_attn is None or "block_table" not in inspect.signature(varlen_attn).parameters:
        raise ConfigError(
            f"attention_backend='varlen' needs torch 2.12 or later, whose varlen_attn takes block tables (this is "
            f"torch {torch.__version__}): pip install --upgrade torch, {_TRY_AUTO}"
        )
    return varlen_attn
