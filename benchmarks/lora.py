"""A batch over 1, 4 and 16 LoRA adapters of mixed ranks, compared with the same batch of the base model.

    python -m benchmarks.lora --rounds 5

All requests of a batch run at once, in one engine; the adapters are on all linear layers. In every round, the base
model and each number of adapters take turns. One JSON line is printed per round (output tokens per second, and each
ratio to the base model), then one with the medians, and the times to load and to unload an adapter of the largest rank.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.make_random_adapter import make_adapter
from pagoda import LLM, LoRARequest, SamplingParams
from pagoda.base.config import ModelConfig
from pagoda.loading.resolve import resolve_model

RANKS = (8, 64, 16, 4, 32)
VOCAB = 49_000


def write_adapters(folder: Path, model: str, count: int) -> list[LoRARequest]:
    files = resolve_model(ModelConfig(model=model))
    for number in range(count):
        make_adapter(folder / str(number), files, RANKS[number % len(RANKS)], seed=number, size=0.1)
    return [LoRARequest(str(number), number + 1, str(folder / str(number))) for number in range(count)]


def seconds_of(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest], tokens: int) -> float:
    """Run all prompts; request i uses adapter i modulo their number."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    chosen = [adapters[at % len(adapters)] if adapters else None for at in range(len(prompts))]
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    duration_s = time.perf_counter() - begin_s
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return duration_s


def load_times(llm: LLM, adapter: LoRARequest, times: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each load and unload."""
    loads: list[float] = []
    unloads: list[float] = []
    llm.remove_lora(adapter.lora_int_id)
    for _ in range(times):
        begin_s = time.perf_counter()
        llm.add_lora(adapter)
        loads.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        llm.remove_lora(adapter.lora_int_id)
        unloads.append(time.perf_counter() - begin_s)
    return loads, unloads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--in", dest="prompt_tokens", type=int, default=64)
    parser.add_argument("--out", dest="tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    most = max(given.adapters)
    rng = np.random.default_rng(0)
    ratios: dict[int, list[float]] = {count: [] for count in given.adapters}
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(Path(folder), given.model, most)
        with LLM(
            given.model,
            quantization=given.quantization,
            threads=given.threads,
            max_model_len=1024,
            max_num_seqs=given.requests,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=most,
            max_lora_rank=max(RANKS),
        ) as llm:
            for adapter in adapters:
                llm.add_lora(adapter)
            for number in range(given.rounds + 1):
                prompts = rng.integers(3, VOCAB, (given.requests, given.prompt_tokens)).tolist()
                base_s = seconds_of(llm, prompts, [], given.tokens)
                taken = {count: seconds_of(llm, prompts, adapters[:count], given.tokens) for count in given.adapters}
                if number == 0:  # warm-up
                    continue
                num_tokens = given.requests * given.tokens
                line: dict[str, float] = {"round": number, "base_tokens_per_s": round(num_tokens / base_s, 1)}
                for count, seconds in taken.items():
                    ratios[count].append(base_s / seconds)
                    line |= {
                        f"{count}_tokens_per_s": round(num_tokens / seconds, 1),
                        f"{count}_ratio": round(base_s / seconds, 3),
                    }
                print(json.dumps(line), flush=True)
            largest = next(
                (one for one in adapters if RANKS[(one.lora_int_id - 1) % len(RANKS)] == max(RANKS)), adapters[0]
            )
            loads, unloads = load_times(llm, largest, 5)
    print(
        json.dumps(
            {
                "requests": given.requests,
                **{f"{count}_median_ratio": round(statistics.median(ratios[count]), 3) for count in given.adapters},
                "load_ms": round(1e3 * statistics.median(loads), 2),
                "unload_ms": round(1e3 * statistics.median(unloads), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
