"""What a forward pass must know of its batch: one AttentionMetadata per KV group, passed as an argument."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """The batch as one KV group sees it. Rows stand one after the other in the token dimension.

    query_start: int32 [num_rows + 1], row i's tokens are query_start[i] .. query_start[i+1] - 1.
    seq_lens: int32 [num_rows], tokens in the cache once this step's KV is written (start + num_new);
        the last query of row i stands at position seq_lens[i] - 1.
    block_table: int32 [num_rows, max_blocks]; entries behind a window may be 0 (null block) and are never read.
    slot_mapping: int64 [num_tokens], block_id * block_size + offset, where each token's K and V are written.
    block_size: tokens a block.   max_query_len, max_seq_len: largest of the batch.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The tokens whose final hidden states are wanted: of some rows, the last few; one at least.

    The others leave their K and V in the last layer's cache and are done: nobody reads what would become of them.

    index: int64 [num_tail], which of the batch's tokens, ascending.
    metadata: one per KV group, the batch as if it were these tokens alone; its slot_mapping is still the whole batch's.
    """

    index: torch.Tensor
    metadata: tuple[AttentionMetadata, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One step's input to a model.

    token_ids: int32 [num_tokens].   positions: int32 [num_tokens].
    metadata: one per KV group, in the order of the model's kv_groups.
    tail: the tokens that the forward returns.   logits_index: int64 [num_logits], which of those give logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: tuple[AttentionMetadata, ...]
    tail: Tail
    logits_index: torch.Tensor
