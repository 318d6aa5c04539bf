"""Prompts as embeddings: vectors in place of tokens, next to prompts of text in one batch, found again in the cache."""

import base64

import numpy as np
from safetensors.numpy import save

from pagoda import LLM, SamplingParams


def trained_prompt(seed: int) -> np.ndarray:
    """Return random vectors, in place of those that a soft prompt was trained to: [tokens, hidden size]."""
    return np.random.default_rng(seed).normal(0, 0.1, (40, 576)).astype(np.float32)


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    first, second = trained_prompt(1), trained_prompt(2)
    with LLM("smollm2-135m", max_model_len=512, enable_prompt_embeds=True) as llm:
        outputs = llm.generate(
            ["The capital of France is", {"prompt_embeds": first}, {"prompt_embeds": second}], greedy
        )
        for name, output in zip(("text", "first", "second"), outputs, strict=True):
            print(f"{name}: {len(output.prompt_token_ids or ())} prompt tokens, {output.outputs[0].text!r}")

        again = llm.generate({"prompt_embeds": first}, greedy)[0]
        print(f"again: {again.num_cached_tokens} tokens from the prefix cache, {again.outputs[0].text!r}")

    # What a server takes in the field prompt_embeds of /v1/completions.
    print(f"base64: {len(base64.b64encode(save({'prompt': first})))} characters")


if __name__ == "__main__":
    main()
