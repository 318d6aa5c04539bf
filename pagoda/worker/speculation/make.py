"""Make the Speculator of an executor from a DraftSetup."""

import time

import torch

from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.loading.loader import load_model
from pagoda.worker.adapters import Adapters
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.check_attention import check_attention
from pagoda.worker.device_table import DeviceTable
from pagoda.worker.drafters.registry import DraftParts, make_drafter
from pagoda.worker.drafters.rollout import DraftForward
from pagoda.worker.forward_pass import EagerForward, ForwardPass, ReplayedForward
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.graphed_forward import GraphedForward
from pagoda.worker.sampler import Sampler
from pagoda.worker.speculation.controller import DraftController
from pagoda.worker.speculation.setup import DraftSetup
from pagoda.worker.speculation.speculator import Speculator


def make_speculator(
    setup: DraftSetup,
    forward: ForwardPass,
    table: DeviceTable,
    cache: CacheEngine,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    grammars: GrammarRows | None = None,
    adapters: Adapters | None = None,
    attention_backend: str = "auto",
) -> Speculator:
    """Return the speculator of a worker, with the draft model loaded if there is one.

    forward, table, cache: of the model whose tokens are drafted.   dtype: of the draft model's weights and KV cache.
    grammars: of the worker's rows; what they force is drafted first.   adapters: of its rows; a draft model has none.
    attention_backend: of `ops`; raises ConfigError if it cannot compute the draft model.
    """
    parts: DraftParts | None = None
    if setup.num_layers:
        parts = DraftParts(DraftForward(forward, table, cache.layers, device, setup.num_layers, adapters), Sampler(ops))
    elif setup.files is not None:
        max_rows, max_len = table.token_ids.shape
        model = load_model(setup.files, ops, dtype, device, setup.config.quantization, max_len)
        check_attention(attention_backend, model, dtype, dtype)
        drafting: ForwardPass = EagerForward(model, ops)
        if device.type == "cuda" and ops.name == "triton":
            # Its cache lacks the KV of a row's last token, and often of the one before.
            drafting = GraphedForward(model, ops, max_rows, max_len, device, max_query_len=2)
        elif isinstance(ops, NativeOps):
            drafting = ReplayedForward(model, ops)
        own_cache = CacheEngine(model.kv_groups, table.block_size, setup.num_blocks, 0, dtype, device)
        own_table = DeviceTable(max_rows, max_len, table.block_size, len(model.kv_groups))
        draft = DraftForward(drafting, own_table, own_cache.layers, device)
        parts = DraftParts(draft, Sampler(ops), setup.num_blocks)
    drafter = make_drafter(setup.config, parts, grammars)
    max_rows = len(table.num_tokens)
    controller = DraftController(max_rows, setup.max_drafts) if setup.config.adaptive else None
    return Speculator(
        drafter, controller, setup.max_drafts, max_model_len, max_rows, time.perf_counter, setup.num_steps_ahead
    )
