"""Beam search: the most likely outputs of a prompt, instead of sampled ones."""

from pagoda import LLM, BeamSearchParams

PROMPTS = ["The capital of France is", "To make bread you need"]


def main() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=16)
    with LLM("smollm2-135m", max_model_len=512) as llm:
        for output in llm.beam_search(PROMPTS, params):
            for sequence in output.sequences:  # best first
                print(f"{sequence.cum_logprob:7.2f} {sequence.text!r}")

        # A larger length_penalty prefers longer outputs; early_stopping ends the search with the first four that end.
        longer = BeamSearchParams(beam_width=4, max_tokens=16, length_penalty=2.0, early_stopping=True)
        print(llm.beam_search(PROMPTS[0], longer)[0].sequences[0].text)


if __name__ == "__main__":
    main()
