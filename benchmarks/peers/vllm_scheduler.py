"""Times vLLM's own scheduler. Run by a Python that has vLLM: `python vllm_scheduler.py MODEL_DIR NUM_SEQS ...`.

The same work as `pagoda bench scheduler`: NUM_SEQS requests of 512 tokens, then decode steps in which all run.
"""
# pyright: basic, reportMissingImports=false

import json
import os
import random
import statistics
import sys
import time

BLOCK_SIZE = 16
PROMPT = 512
STEPS = 60
LIMIT = 8192


def make_scheduler(model: str, num_seqs: int, caching: bool):
    """vLLM's Scheduler, without a device or weights."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float16", max_model_len=LIMIT, skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=LIMIT,
            max_model_len=LIMIT,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )
    blocks = num_seqs * ((PROMPT + 2 * STEPS) // BLOCK_SIZE + 3) + 16
    cache.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    memory = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=memory,
        log_stats=False,
        block_size=BLOCK_SIZE,
        structured_output_manager=StructuredOutputManager(config),
    )


def measure(model: str, num_seqs: int, caching: bool) -> dict[str, object]:
    """One line of figures, in the shape `pagoda bench scheduler --json` prints."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = make_scheduler(model, num_seqs, caching)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if caching else None
    generator = random.Random(0)
    prompts = [[generator.randrange(49_000) for _ in range(PROMPT)] for _ in range(num_seqs)]
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0)
        scheduler.add_request(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    add_us = (time.perf_counter() - started) / num_seqs * 1e6
    schedule_us: list[float] = []
    update_us: list[float] = []
    while len(schedule_us) < STEPS:
        before = time.perf_counter()
        output = scheduler.schedule()
        planned = time.perf_counter()
        ids = list(output.num_scheduled_tokens)
        decodes = len(ids) == num_seqs and all(count == 1 for count in output.num_scheduled_tokens.values())
        requests = scheduler.requests
        tokens = [[7] if requests[i].num_computed_tokens >= requests[i].num_prompt_tokens else [] for i in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        received = time.perf_counter()
        scheduler.update_from_output(output, result)
        done = time.perf_counter()
        if decodes:
            schedule_us.append((planned - before) * 1e6)
            update_us.append((done - received) * 1e6)
    schedule, update = statistics.median(schedule_us), statistics.median(update_us)
    return {
        "engine": "vllm-scheduler",
        "num_seqs": num_seqs,
        "prefix_caching": caching,
        "schedule_us": round(schedule, 1),
        "update_us": round(update, 1),
        "per_seq_us": round((schedule + update) / num_seqs, 3),
        "add_request_us": round(add_us, 1),
    }


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # no device is needed for planning
    for num_seqs in map(int, sys.argv[2:]):
        for caching in (False, True):
            print(json.dumps(measure(sys.argv[1], num_seqs, caching)), flush=True)


if __name__ == "__main__":
    main()
