"""One step's input to a model: token rows, attention metadata per KV group, and the paged cache of a layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic

from pagoda.ops.declare import Domain
from pagoda.ops.tensor import Tensor, TensorT


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer(Generic[TensorT]):
    """One layer's paged cache: `k` and `v`, [num_blocks + 1, K, block_size, D]; block 0 is the null block.

    D of v is another where the cache is of `latent_attention`.
    Only kernels look inside; everything else moves whole blocks along dimension 0.
    Of a recurrent layer: `k` has the last inputs of its convolution per block, [num_blocks + 1, rows, 1, D], and `v` a
    matrix per head in float32, [num_blocks + 1, H, D of its keys, D of its values], or no elements.
    k_scale, v_scale: float32 [num_blocks + 1, K, block_size], for a cache of 8 bits (int8, float8_e4m3fn), else None.
    """

    k: TensorT
    v: TensorT
    k_scale: TensorT | None = None
    v_scale: TensorT | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata(Generic[TensorT]):
    """The batch for one KV group. The tokens of a row are consecutive in the token dimension.

    query_start: int32 [num_rows + 1], row i's tokens are query_start[i] .. query_start[i+1] - 1.
    seq_lens: int32 [num_rows], tokens in the cache once this step's KV is written (start + num_new);
        the last query of row i is at position seq_lens[i] - 1.
    block_table: int32 [num_rows, max_blocks]; entries that a window has passed may be 0 (null block), they are never
        read.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset, where each token's K and V are written.
    block_size: tokens per block.   max_query_len, max_seq_len: largest of the batch.
    shared_prefix: int32 [2], (tokens, rows): so many tokens at the beginning of each of the first rows are in the same
        blocks, and were in the cache before this step; None if that is not worth knowing. It changes no result.
    last_seen: int32 [queries], the last position that each query sees, where some see later ones than their own, which
        are in the cache too (the tokens of an image see all of it); None: each sees those up to its own.
    """

    query_start: TensorT
    seq_lens: TensorT
    block_table: TensorT
    slot_mapping: TensorT
    block_size: int
    max_query_len: int
    max_seq_len: int
    shared_prefix: TensorT | None = None
    last_seen: TensorT | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows(Generic[TensorT]):
    """The tokens whose final hidden states are needed: the last few of some rows, at least one token in total.

    The other tokens only leave their K and V in the last layer's cache.

    index: int64 [num_outputs], which of the batch's tokens, ascending.
    metadata: one per KV group, the batch as if it were these tokens alone; its slot_mapping is still the whole batch's.
    """

    index: TensorT
    metadata: tuple[AttentionMetadata[TensorT], ...]

    def of(self, select_rows: Callable[[Tensor, Tensor], Tensor], *values: Tensor) -> tuple[Tensor, ...]:
        """Return these rows of each of `values`: [num_tokens, ...] -> [num_outputs, ...].   select_rows: the op."""
        return tuple(select_rows(value, self.index) for value in values)


@dataclass(frozen=True, slots=True, eq=False)
class Input(Generic[TensorT]):
    """A further input of a model: prompt embeddings, encoder states, adapter indices, a previous stage's hidden states.

    tensor: [rows], [rows, dim] or [rows, heads, dim], contiguous.   domain: what its rows are.
    """

    tensor: TensorT
    domain: Domain = Domain.TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch(Generic[TensorT]):
    """One step's input to a model.

    token_ids: int32 [num_tokens].   positions: int32 [num_tokens], or [num_tokens, runs] (see ForwardOps.rotary), for
        the rotary embedding; where K and V are written is slot_mapping's business.
    metadata: one per KV group, in the order of the model's kv_groups.
    outputs: the tokens that the forward returns.   logits_index: int64 [num_logits], which of those give logits.
    inputs: what else this step brings, by name.
    num_layers: compute only so many of the first layers (for a draft); 0 for all.
    A program is recorded for each number of layers and set of inputs.
    """

    token_ids: TensorT
    positions: TensorT
    metadata: tuple[AttentionMetadata[TensorT], ...]
    outputs: OutputRows[TensorT]
    logits_index: TensorT
    inputs: Mapping[str, Input[TensorT]] = field(default_factory=dict[str, Input[TensorT]])
    num_layers: int = 0
