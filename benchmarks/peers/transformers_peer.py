"""transformers, static batches of 16 sorted by output length. usage: transformers_peer.py MODEL_DIR WORKLOAD.json"""

import sys

import torch
from common import measure, read_work
from transformers import AutoModelForCausalLM

BATCH = 16


def main() -> None:
    work = sorted(read_work(sys.argv[2]), key=lambda request: request["max_tokens"])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run() -> int:
        for at in range(0, len(work), BATCH):
            group = work[at : at + BATCH]
            width = max(len(request["prompt_token_ids"]) for request in group)
            pads = [width - len(request["prompt_token_ids"]) for request in group]
            ids = torch.tensor([[2] * pad + r["prompt_token_ids"] for pad, r in zip(pads, group, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            longest = group[-1]["max_tokens"]
            model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False)
        return sum(request["max_tokens"] for request in work)

    measure("transformers", work, run)


if __name__ == "__main__":
    main()
