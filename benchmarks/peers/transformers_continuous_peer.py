"""transformers' continuous batching on a GPU. usage: transformers_continuous_peer.py MODEL_DIR WORKLOAD.json"""

import sys

import torch
from common import measure, read_work, with_other_tokens
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints


def main() -> None:
    work = read_work(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, device_map="cuda", attn_implementation="sdpa"
    ).eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=8)
    # As generate_batch does it: sizes from the workload, and graphs captured before the start.
    hints = WorkloadHints(
        max_prompt_length=max(len(request["prompt_token_ids"]) for request in work),
        max_generated_length=max(request["max_tokens"] for request in work),
        num_requests=len(work),
    )
    manager = model.init_continuous_batching(generation_config=config, workload_hints=hints)
    manager.warmup()
    manager.start()

    def run(requests: list[dict[str, object]]) -> int:
        for request in requests:
            manager.add_request(request["prompt_token_ids"], max_new_tokens=request["max_tokens"])
        left, num_out = len(requests), 0
        while left:
            result = manager.get_result(timeout=300)
            if result is None:
                sys.exit("no result for 300 s")
            if result.error is not None:
                sys.exit(f"a request was not served: {result.error}")
            if result.is_finished():
                left -= 1
                num_out += len(result.generated_tokens)
        return num_out

    run(with_other_tokens(work))
    measure("transformers continuous batching", work, lambda: run(work))
    manager.stop(block=True)


if __name__ == "__main__":
    main()
