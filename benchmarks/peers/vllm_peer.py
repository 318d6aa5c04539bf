"""vLLM's CPU build. usage: vllm_peer.py MODEL_DIR WORKLOAD.json"""

import os
import sys

from common import measure, read_work


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    work = read_work(sys.argv[2])
    longest = max(len(request["prompt_token_ids"]) + request["max_tokens"] for request in work)
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=max(2048, longest), max_num_seqs=max(8, len(work)))

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length) for length in lengths]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate([list(range(10, 40))], [8])
    measure("vllm", work, lambda: generate([r["prompt_token_ids"] for r in work], [r["max_tokens"] for r in work]))


if __name__ == "__main__":
    main()
