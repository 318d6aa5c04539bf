"""Beam search of width N compared with N independent requests for the same prompts.

    python benchmarks/beams.py --width 4 --rounds 5

Both generate N outputs of --tokens tokens per prompt (eos is ignored), in turn, in one engine. `independent` sends each
prompt N times, sampled with different seeds; with prefix caching, as here, the prompt is computed once either way. One
JSON line is printed per round (output tokens per second, and the ratio of the first to the second), and the median.

    python benchmarks/beams.py --model FOLDER --workload WORKLOAD.json

runs a beam search for each request of a workload instead, and prints the JSON line that compare.py reads.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from pagoda import LLM, BeamSearchParams, SamplingParams
from pagoda.cli.session import seconds_since_start

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


def run_workload(llm: LLM, path: Path, width: int) -> dict[str, object]:
    """Search for the requests of a workload together, as many as fit at once; the line that compare.py reads."""
    work = json.loads(path.read_text())
    lengths = {request["max_tokens"] for request in work}
    if len(lengths) != 1:
        raise SystemExit(f"{path}: the requests of a beam search must have one max_tokens, not {sorted(lengths)}")
    params = BeamSearchParams(beam_width=width, max_tokens=lengths.pop(), ignore_eos=True)
    llm.beam_search([{"prompt_token_ids": list(range(10, 40))}], BeamSearchParams(width, max_tokens=8, ignore_eos=True))
    cold_start_s = seconds_since_start()
    begin_s = time.perf_counter()
    outputs = llm.beam_search([{"prompt_token_ids": request["prompt_token_ids"]} for request in work], params)
    secs = time.perf_counter() - begin_s
    num_in = sum(len(request["prompt_token_ids"]) for request in work)
    num_out = len(outputs) * width * params.max_tokens
    assert all(len(output.sequences) == width for output in outputs)
    line: dict[str, object] = {
        "engine": "pagoda",
        "requests": len(work),
        "in": num_in,
        "out": num_out,
        "secs": round(secs, 3),
    }
    return line | {"out_tok_s": round(num_out / secs, 1), "cold_start_s": round(cold_start_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    given = parser.parse_args()
    options = {"threads": given.threads} if given.threads else {}
    if given.workload:
        with LLM(given.model, max_num_seqs=given.max_num_seqs, max_model_len=2048, **options) as llm:
            print(json.dumps(run_workload(llm, given.workload, given.width)))
        return
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
