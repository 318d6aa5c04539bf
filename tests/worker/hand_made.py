"""SchedulerOutputs made by hand, and a model whose output shows what it was given."""

from collections.abc import Sequence

import numpy as np
import torch

from pagoda.base.model_spec import ModelSpec
from pagoda.base.pooling import PoolingParams, PoolingPlan
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.core.kv import KVGroupSpec, KVShape
from pagoda.core.request import AdmitKind
from pagoda.core.scheduler_output import RowInit, SchedulerOutput
from pagoda.kernels.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.worker.speculation.setup import DraftSetup

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)


def draft_setup(max_drafts: int, num_steps_ahead: int = 0, adaptive: bool = False) -> DraftSetup:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=max_drafts, adaptive=adaptive)
    return DraftSetup(config, num_steps_ahead=num_steps_ahead)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def row_init(
    row: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    sampling: SamplingParams | None = GREEDY,
    *,
    num_prompt: int | None = None,
    num_computed: int = 0,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    pooling: PoolingParams | None = None,
    cache_salt: str | None = None,
) -> RowInit:
    return RowInit(
        row=row,
        request_id=f"request-{row}",
        sequence=0,
        kind=AdmitKind.NEW,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed=num_computed,
        block_ids=(np.array(blocks, np.int32),),
        seed=seed,
        eos_token_ids=eos,
        sampling=sampling,
        pooling=pooling,
        cache_salt=cache_salt,
        key=(0, row),
    )


def step(
    number: int,
    spans: Sequence[tuple[int, int, int]],
    samples: Sequence[tuple[int, int]] | None = None,
    **events: object,
) -> SchedulerOutput:
    """spans: (row, start, num_new).   samples: (row, index into spans); None: each span samples for itself."""
    table = np.array(spans, np.int32).reshape(-1, 3)
    pairs = [(span[0], i) for i, span in enumerate(spans)] if samples is None else samples
    picked = np.array(pairs, np.int32).reshape(-1, 2)
    return SchedulerOutput(
        number, table[:, 0], table[:, 1], table[:, 2], picked[:, 0], picked[:, 1], int(table[:, 2].sum()), **events
    )  # type: ignore[arg-type]


def expected_next(tokens: Sequence[int]) -> int:
    """What PagedSumModel's greedy token after `tokens` is: it depends on every token and its place."""
    return sum((token + 1) * (position + 3) for position, token in enumerate(tokens)) % VOCAB


class PagedSumModel:
    """One layer whose KV are the numbers token + 1; its hidden state is a weighted sum of what the row's pages hold.

    broken_token: a row that ends with this token gets NaN.
    """

    dense = ()
    generates = True

    def __init__(self, broken_token: int = -1, pooling: PoolingPlan | None = None) -> None:
        self.pooling = pooling or PoolingPlan()
        self.kv_groups = (KVGroupSpec(shape=KVShape(1, 2, 2)),)
        self.num_token_types = 0
        self.spec = ModelSpec("paged_sum", VOCAB, 1, 1, 1, 1, 1, 2, 4096, (0,))
        self.broken_token = broken_token

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        metadata, cache = batch.metadata[0], kv[0]
        size = metadata.block_size
        for token, slot in zip(batch.token_ids.tolist(), metadata.slot_mapping.tolist(), strict=True):
            cache.k[slot // size, 0, slot % size, 0] = token + 1
        hidden = []
        for row, (begin, end) in enumerate(zip(metadata.query_start[:-1], metadata.query_start[1:], strict=True)):
            for t in range(int(begin), int(end)):
                position = int(batch.positions[t])
                assert position == int(metadata.seq_lens[row]) - int(end) + t
                pages = metadata.block_table[row, : position // size + 1].long()
                seen = cache.k[pages, 0, :, 0].reshape(-1)[: position + 1]
                hidden.append(float((seen * torch.arange(3, position + 4, device=seen.device)).sum()))
                if int(batch.token_ids[t]) == self.broken_token:
                    hidden[-1] = float("nan")
        return torch.tensor(hidden, device=batch.token_ids.device)[batch.outputs.index].unsqueeze(1)

    def compute_logits(self, ops: ForwardOps, hidden: torch.Tensor) -> torch.Tensor:
        target = torch.nan_to_num(hidden) % VOCAB
        logits = -(torch.arange(VOCAB, device=hidden.device) - target).abs()
        return torch.where(hidden.isnan(), hidden, logits)
