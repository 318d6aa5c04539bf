"""Engines for tests, and the loop that drives one to the end."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pagoda.base.clock import SystemClock
from pagoda.base.config import CacheConfig
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import DraftsVerified, Ended
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.executor import Executor
from pagoda.engine.wire import EngineSizes

MAX_STEPS = 20_000


@dataclass
class Answers:
    """tokens: (request id, sequence) -> emitted tokens.   finishes: the same key -> Ended.

    logprobs: the same key -> the log-probabilities of those tokens, where the step has any.
    pooled: request id -> vector.
    """

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], Ended] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    pooled: dict[str, np.ndarray] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    def take(self, outputs: EngineCoreOutputs, ids: Sequence[str]) -> None:
        at = 0
        for handle, sequence, count in zip(outputs.handles, outputs.sequences, outputs.counts, strict=True):
            key = (ids[handle], int(sequence))
            assert key not in self.finishes, f"{key} emits after its end"
            self.tokens.setdefault(key, []).extend(outputs.token_ids[at : at + count].tolist())
            if outputs.logprobs is not None:
                self.logprobs.setdefault(key, []).extend(outputs.logprobs.logprobs[at : at + count, 0].tolist())
            at += count
        self.pooled |= {ids[handle]: vector for handle, vector in outputs.pooled.items()}
        for event in outputs.events:
            if isinstance(event, DraftsVerified):
                self.num_drafted += sum(event.num_drafted)
                self.num_accepted += sum(event.num_accepted)
        for finish in outputs.ends:
            key = (ids[finish.handle], finish.sequence)
            assert key not in self.finishes, f"{key} ends twice"
            self.finishes[key] = finish


def request(
    number: int,
    prompt: Sequence[int],
    params: SamplingParams | PoolingParams,
    seed: int = 0,
    eos: tuple[int, ...] = (),
) -> Request:
    return Request(
        f"r{number}",
        np.array(prompt, np.int32),
        params if isinstance(params, SamplingParams) else None,
        params if isinstance(params, PoolingParams) else None,
        handle=number,
        seed=seed,
        eos_token_ids=eos,
        arrival_time_s=float(number),
    )


def drive(
    core: EngineCore, requests: Sequence[Request], on_step: Callable[[int, Answers], None] | None = None
) -> Answers:
    """Add all requests (numbered 0, 1, ..), step until all is done. on_step(number of steps so far, answers so far)."""
    answers = Answers()
    ids = [each.request_id for each in requests]
    for each in requests:
        core.add_request(each)
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            answers.take(outputs, ids)
        answers.num_steps += 1
        if on_step is not None:
            on_step(answers.num_steps, answers)
        assert answers.num_steps < MAX_STEPS, "the engine makes no progress"
    return answers


def make_core(
    executor_for: Callable[[int], Executor],
    *,
    num_blocks: int = 64,
    max_model_len: int = 256,
    vocab_size: int = 1000,
    cache: CacheConfig | None = None,
    num_host_blocks: int = 0,
    groups: tuple[KVGroupSpec, ...] = (KVGroupSpec(layers=(0,)),),
    waits_for_drafts: bool = False,
    **options: object,
) -> EngineCore:
    """A started engine on `executor_for(rows of the table)`. options: fields of SchedulerOptions."""
    config = SchedulerOptions(**options)  # type: ignore[arg-type]
    clock = SystemClock()
    scheduler = Scheduler(
        config,
        cache or CacheConfig(block_size=4),
        groups,
        num_blocks,
        max_model_len,
        clock,
        num_host_blocks=num_host_blocks,
    )
    executor = executor_for(scheduler.max_rows)
    executor.start()
    executor.set_pools(num_blocks, num_host_blocks)
    sizes = EngineSizes(max_model_len, 4, num_blocks, num_host_blocks)
    return EngineCore(
        scheduler,
        executor,
        clock,
        sizes,
        vocab_size,
        config.pipeline_depth,
        waits_for_drafts=waits_for_drafts,
    )


def write_tiny_llama(folder: Path, seed: int = 0, window: int = 0, mixed: bool = False) -> Path:
    """A random model with GQA in the Hugging Face layout, fp32: two layers of Llama, or of Mistral if it has a window.

    mixed: three layers of Qwen2, the middle one with the window, so that there are several KV groups.
    """
    import torch
    from safetensors.torch import save_file

    hidden, inner, heads, kv_heads, head_dim, vocab, layers = 48, 96, 4, 2, 16, 160, 3 if mixed else 2
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> "torch.Tensor":
        return torch.randn(shape, generator=generator) * (2.0 / shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors |= {
            f"{p}input_layernorm.weight": torch.ones(hidden),
            f"{p}post_attention_layernorm.weight": torch.ones(hidden),
            f"{p}self_attn.q_proj.weight": weight(heads * head_dim, hidden),
            f"{p}self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{p}self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{p}self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            f"{p}mlp.gate_proj.weight": weight(inner, hidden),
            f"{p}mlp.up_proj.weight": weight(inner, hidden),
            f"{p}mlp.down_proj.weight": weight(hidden, inner),
        }
        if mixed:
            tensors |= {
                f"{p}self_attn.q_proj.bias": weight(heads * head_dim),
                f"{p}self_attn.k_proj.bias": weight(kv_heads * head_dim),
                f"{p}self_attn.v_proj.bias": weight(kv_heads * head_dim),
            }
    tensors |= {"model.norm.weight": torch.ones(hidden), "lm_head.weight": weight(vocab, hidden)}
    kind = "qwen2" if mixed else "mistral" if window else "llama"
    config: dict[str, object] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if window:
        config["sliding_window"] = window
    if mixed:
        config["use_sliding_window"] = True
        config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
