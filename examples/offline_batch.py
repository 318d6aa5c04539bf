"""Many prompts in one call: they run in one batch, and the outputs come back in the order of the prompts."""

from pagoda import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is"]


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=12, n=2)
    with LLM("smollm2-135m", max_model_len=512) as llm:
        for output in llm.generate(PROMPTS, greedy):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        # Different parameters per prompt. n=2 returns two outputs for one prompt, which is computed once.
        for output in llm.generate(PROMPTS[:2], [greedy, sampled]):
            for answer in output.outputs:
                print(f"{output.prompt!r} [{answer.index}] {len(answer.token_ids)} tokens, {answer.finish_reason}")


if __name__ == "__main__":
    main()
