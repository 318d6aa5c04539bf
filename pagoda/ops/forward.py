"""ForwardOps: every op that a model's forward may call.

A model computes with nothing else, so the same declarative forward runs on the reference kernels, on the native CPU
ones, on a GPU, or is recorded once and replayed.

Shapes: T tokens, H query heads, K KV heads, D head size, S selected rows, E experts. x may be float32, bfloat16 or
float16; sums are in float32. An op returns a new tensor. Every op gives each row the same bits whatever other rows are
in the batch (the native kernels; the torch versions as far as torch's own library does).
"""

from typing import Protocol

from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.tensor import ExpertWeights, LinearWeight, Tensor


class ForwardOps(Protocol):
    """What a forward receives. Each method's reference is `kernels/<op>/reference.py`."""

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype."""
        ...

    def logits(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[S, in] -> float32 [S, vocab]."""
        ...

    def embedding(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """int32 [T], [vocab, hidden] -> [T, hidden]; scale is rounded to the table's dtype first (Gemma does)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """x [..., D] / rms(x) * weight [D], over the last dimension; unit_offset: * (1 + weight)."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normed."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual."""
        ...

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, K, D] (NeoX halves). cos, sin float32 [max_position, D / 2]."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
        """Write k, v [T, K, D] at slot_mapping."""
        ...

    def rotary_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`rotary` and `write_kv` in one: writes the rotated k and v, returns the rotated q."""
        ...

    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal paged attention, q [T, H, D] -> [T, H * D].

        window: the last `window` tokens, itself included (0: all). softcap: scores become
        softcap * tanh(score / softcap) (0: off). Reads the pages in place.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] (gate then up) -> silu(gate) * up, [T, I]."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] (gate then up) -> gelu_tanh(gate) * up, [T, I]."""
        ...

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        top_k: int,
        renormalize: bool,
    ) -> Tensor:
        """Route each token to its top_k experts and sum their gated MLPs by routing weight, [T, hidden] -> [T, hidden].

        router_logits: [T, E], any float dtype.   gate_up: E weights [2 I, hidden], gate then up.
        down: E weights [hidden, I].
        A routing weight is the softmax over all experts, in float32; of equals the lower expert is chosen.
        renormalize: the chosen weights are divided by their sum (Mixtral; Qwen3-MoE where norm_topk_prob says so).
        An expert computes down(silu(gate(x)) * up(x)); the weighted sum is in float32, the largest weight first, and
        rounded once to x's dtype.
        """
        ...

    def split_qkv(self, qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 K) D] -> q [T, H, D], k [T, K, D], v [T, K, D]; views where possible."""
        ...

    def select_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """[T, hidden], int64 [S] -> [S, hidden]."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""
        ...
