"""vLLM, on a GPU or in its CPU build. usage: vllm_peer.py MODEL_DIR WORKLOAD.json [--warm-up]

--warm-up: run the workload once before, not measured, with other tokens in its prompts.
"""

import os
import sys
from typing import Any

from common import measure, read_work, with_other_tokens


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    work = read_work(sys.argv[2])
    longest = max(len(request["prompt_token_ids"]) + request["max_tokens"] for request in work)
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=max(2048, longest), max_num_seqs=max(8, len(work)))

    def generate(requests: list[dict[str, Any]]) -> int:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=each["max_tokens"]) for each in requests]
        prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate([{"prompt_token_ids": list(range(10, 40)), "max_tokens": 8}])
    if "--warm-up" in sys.argv[3:]:
        generate(with_other_tokens(work))
    measure("vllm", work, lambda: generate(work))


if __name__ == "__main__":
    main()
