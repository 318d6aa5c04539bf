"""What Triton's attention allocates next to its result: the states of splits, which must not follow from a prompt."""

from functools import partial
from typing import Any

import pytest
import torch

from pagoda.kernels.batch import AttentionMetadata, KVLayer

HEADS, KV_HEADS, HEAD_DIM, BLOCK, LONGEST = 32, 8, 128, 16, 32_768


class Noted:
    """A kernel that notes the arguments of its launches, and does nothing."""

    def __init__(self) -> None:
        self.args: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: self.args.append(args)


def states_of(
    query_lens: list[int], make_triton_ops: Any, monkeypatch: pytest.MonkeyPatch, longest: int = LONGEST
) -> int:
    """Return the bytes of the states of all splits."""
    from pagoda.kernels.attention import triton_attention

    kernels = {name: Noted() for name in ("attend_splits", "merge_splits", "attend_tiles")}
    for name, noted in kernels.items():
        monkeypatch.setattr(triton_attention, name, noted)
    rows, tokens = len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.full((rows,), longest, dtype=torch.int32)
    table = torch.zeros(rows, longest // BLOCK, dtype=torch.int32)
    slots = torch.zeros(tokens, dtype=torch.int64)
    metadata = AttentionMetadata(starts, seq_lens, table, slots, BLOCK, max(query_lens), longest)
    pages = torch.zeros(1, KV_HEADS, BLOCK, HEAD_DIM, dtype=torch.bfloat16)
    q = torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    make_triton_ops(max_model_len=LONGEST).attention(q, KVLayer(pages, pages), metadata, 0.1)
    return sum(x.numel() * x.element_size() for args in kernels["attend_splits"].args for x in args[1:4])


def test_a_prompt_among_decodes_has_no_states(make_triton_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    per_query = HEADS * (LONGEST // 512) * (HEAD_DIM + 2) * 4
    assert states_of([1] * 100, make_triton_ops, monkeypatch) == 100 * per_query
    assert states_of([4] * 100, make_triton_ops, monkeypatch) == 400 * per_query
    assert states_of([8000], make_triton_ops, monkeypatch) == 0
    for decodes in (1, 50, 255, 300):
        states = states_of([1] * decodes + [8000], make_triton_ops, monkeypatch) // per_query
        assert decodes <= states <= max(256, decodes + 1)


def test_contexts_of_a_few_rows_are_cut_shorter(make_triton_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def splits_of(num_rows: int, longest: int, **options: bool) -> int:
        ops = partial(make_triton_ops, **options)
        states = states_of([1] * num_rows, ops, monkeypatch, longest)
        return states // (num_rows * HEADS * (HEAD_DIM + 2) * 4)

    assert splits_of(1, 8192) == splits_of(3, 8192) == 32
    assert splits_of(100, 8192) == splits_of(1, 8192, batch_invariant=True) == 16
    assert splits_of(1, LONGEST) == 64
