"""Beam search of width N compared with N independent requests for the same prompts.

    python benchmarks/beams.py --width 4 --rounds 5

Both generate N outputs of --tokens tokens per prompt (eos is ignored), in turn, in one engine. `independent` sends each
prompt N times, sampled with different seeds; with prefix caching, as here, the prompt is computed once either way. One
JSON line is printed per round (output tokens per second, and the ratio of the first to the second), and the median.
"""

import argparse
import json
import statistics
import time

from pagoda import LLM, BeamSearchParams, SamplingParams

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "Photosynthesis is the process by which",
    "To make bread you need flour,",
    "The three primary colours are",
    "A good way to learn a language is",
    "The train to the mountains leaves",
)


def seconds_of_beams(llm: LLM, prompts: list[str], width: int, tokens: int) -> float:
    params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    outputs = llm.beam_search(prompts, params)
    duration_s = time.perf_counter() - begin_s
    assert all(len(output.sequences) == width for output in outputs)
    return duration_s


def seconds_of_independent(llm: LLM, prompts: list[str], width: int, tokens: int) -> float:
    each = [prompt for prompt in prompts for _ in range(width)]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed) for seed in range(len(each))]
    begin_s = time.perf_counter()
    outputs = llm.generate(each, params, use_tqdm=False)
    duration_s = time.perf_counter() - begin_s
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return duration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    options = {"threads": given.threads} if given.threads else {}
    prompts = [TEXTS[at % len(TEXTS)] for at in range(given.prompts)]
    num_tokens = given.width * given.prompts * given.tokens
    ratios: list[float] = []
    with LLM(given.model, max_num_seqs=max(given.width * given.prompts, 8), max_model_len=1024, **options) as llm:
        for number in range(given.rounds + 1):
            beams_s = seconds_of_beams(llm, prompts, given.width, given.tokens)
            independent_s = seconds_of_independent(llm, prompts, given.width, given.tokens)
            if number == 0:  # warm-up
                continue
            ratios.append(independent_s / beams_s)
            found = {"beams_tokens_per_s": num_tokens / beams_s, "independent_tokens_per_s": num_tokens / independent_s}
            print(json.dumps({"round": number, **found, "ratio": ratios[-1]}), flush=True)
    print(json.dumps({"width": given.width, "prompts": given.prompts, "median_ratio": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
