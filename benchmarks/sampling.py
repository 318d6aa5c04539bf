"""What choosing tokens costs: a batch in which every request samples differently, compared with a greedy one.

    python benchmarks/sampling.py                       the sampler alone, feature by feature: CPU time per step
    python benchmarks/sampling.py --model smollm2-135m  whole steps of a model, greedy and mixed in turn: their ratio

The mixed batch has one request for each combination of temperature, top-k, top-p, min-p, the three penalties, logit
bias, bad words, allowed tokens and min_tokens that the list below makes; no two are equal. Figures are medians.
"""

import argparse
import itertools
import statistics
import time

import numpy as np
import torch

from pagoda import LLM, SamplingParams
from pagoda.core.request import AdmitKind
from pagoda.core.scheduler_output import RowInit, SchedulerOutput
from pagoda.kernels.select import select_ops
from pagoda.worker.devices.cpu import CpuDevice
from pagoda.worker.sampler import Sampler
from pagoda.worker.table_mirror import TableMirror

PROMPT_TOKENS = 300
FIRST_OUTPUT_TOKENS = 200


def combination(index: int, vocab_size: int, max_tokens: int | None = None) -> SamplingParams:
    """Return the index-th of many different ways to sample."""
    choices = itertools.product(
        (0.7, 1.0, 0.0), ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95})
    )
    temperature, filters = list(choices)[index % 15]
    rng = np.random.default_rng(index)
    some = rng.choice(vocab_size, 300, replace=False).tolist()
    on = [bool(index + 1 >> bit & 1) for bit in range(6)]
    return SamplingParams(
        temperature=temperature,
        seed=index,
        repetition_penalty=1.0 + 0.01 * (1 + index % 7) if on[0] else 1.0,
        presence_penalty=0.1 if on[1] else 0.0,
        frequency_penalty=0.05 if on[2] else 0.0,
        logit_bias=dict.fromkeys(some[:20], 0.5) if on[3] else None,
        bad_words_token_ids=((some[20],), (some[21], some[22])) if on[4] else (),
        allowed_token_ids=tuple(range(100, vocab_size // 2)) if on[5] and not on[0] else None,
        min_tokens=10 if index % 3 == 0 else 0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        **filters,
    )


def table_of(params: list[SamplingParams], vocab_size: int) -> TableMirror:
    rng = np.random.default_rng(0)
    table = TableMirror(len(params), 4096, 16, 1)
    admitted = []
    for row, of_row in enumerate(params):
        # Words of a text: few are frequent.
        tokens = np.minimum(rng.zipf(1.3, PROMPT_TOKENS + FIRST_OUTPUT_TOKENS), vocab_size - 1).astype(np.int32)
        blocks = (np.array([1], np.int32),)
        admitted.append(
            RowInit(row, str(row), 0, AdmitKind.NEW, tokens, PROMPT_TOKENS, 0, blocks, row, (0,), of_row, None)
        )
    none = np.empty(0, np.int32)
    table.apply(SchedulerOutput(1, none, none, none, none, none, 0, admitted=tuple(admitted)))
    return table


def text_like_logits(batch: int, vocab_size: int) -> torch.Tensor:
    """Logits as of a language model: a few likely tokens, and a long tail."""
    generator = torch.Generator().manual_seed(1)
    ranks = torch.rand(batch, vocab_size, generator=generator).argsort(1).float() + 1
    return 14.0 - 1.6 * ranks.log() + 0.5 * torch.randn(batch, vocab_size, generator=generator)


def time_sampler(params: list[SamplingParams], logits: torch.Tensor, sampler: Sampler, steps: int) -> float:
    """Return the median milliseconds of CPU time of a step, all threads together."""
    table = table_of(params, logits.shape[1])
    rows = np.arange(len(params), dtype=np.int32)
    times = []
    for _ in range(steps):
        work = logits.clone()
        positions = table.num_tokens[rows]
        begin = time.process_time()
        drawn = sampler.sample(work, table, rows, positions)
        times.append(time.process_time() - begin)
        assert drawn.finite.all()
        table.record_tokens(rows, positions, drawn.tokens)
    return statistics.median(times) * 1e3


FEATURES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_p, temperature 1.5": {"temperature": 1.5, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "frequency and presence penalty": {"temperature": 0.0, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logit bias of 20 tokens": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(20), 1.0)},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": ((5,), (6, 7))},
    "allowed tokens, half of all": {"temperature": 0.0, "allowed_token_ids": tuple(range(24576))},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
}


def sampler_alone(batch: int, vocab_size: int, threads: int, steps: int, kernels: str) -> None:
    torch.set_num_threads(threads)
    sampler = Sampler(select_ops(kernels, CpuDevice(threads)))
    logits = text_like_logits(batch, vocab_size)
    print(f"batch {batch}, vocabulary {vocab_size}, {threads} threads, kernels {kernels}: ms of CPU time per step")
    for name, fields in FEATURES.items():
        params = [SamplingParams(max_tokens=None, **fields) for _ in range(batch)]
        print(f"  {name:32}{time_sampler(params, logits, sampler, steps):8.3f}")
    mixed = [combination(i, vocab_size) for i in range(batch)]
    print(f"  {'all different':32}{time_sampler(mixed, logits, sampler, steps):8.3f}")


def whole_steps(model: str, vocab_size: int, batch: int, tokens: int, rounds: int) -> None:
    """Alternate greedy and mixed batches of one engine; print milliseconds per step and the ratio."""
    llm = LLM(model=model, max_model_len=2048, max_num_seqs=batch, enable_prefix_caching=False)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(100, vocab_size - 100, 32).tolist()} for _ in range(batch)]
    kinds = {
        "greedy": [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)] * batch,
        "mixed": [combination(i, vocab_size, tokens) for i in range(batch)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for params in kinds.values():
        llm.generate(prompts, params)
    for _ in range(rounds):
        for name, params in kinds.items():
            begin = time.perf_counter()
            llm.generate(prompts, params)
            seconds[name].append(time.perf_counter() - begin)
    for name, of_kind in seconds.items():
        print(f"{name:8}{statistics.median(of_kind) / tokens * 1e3:9.2f} ms per step of {batch}")
    ratios = [mixed / greedy for greedy, mixed in zip(seconds["greedy"], seconds["mixed"], strict=True)]
    print(f"mixed / greedy: {statistics.median(ratios):.3f} (rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="measure whole steps of this model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", default="native")
    given = parser.parse_args()
    if given.model:
        whole_steps(given.model, given.vocab_size, given.batch, given.steps, given.rounds)
    else:
        sampler_alone(given.batch, given.vocab_size, given.threads, given.steps, given.kernels)
