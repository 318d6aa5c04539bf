#!/usr/bin/env python3
"""Perplexity of a model on a fixed text, under any flags of the engine: what a narrower format costs.

usage: perplexity.py [--text perplexity.txt] [--context 512] [--peer LLAMA_PERPLEXITY] [--json] [any flag of the engine]

The text is cut into windows of `context` tokens, and every token but the first of its window counts. The log-
probabilities are the engine's own (`prompt_logprobs`), so all of it is measured: weights, KV cache, kernels.

With --peer, llama.cpp's llama-perplexity measures the same GGUF file on the same text, and what counts is what counts
there: in whole windows only, the tokens after the middle of each; a BOS that the tokenizer adds replaces the first
token of every window.
"""

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.options import engine_options

if TYPE_CHECKING:
    from pagoda.llm import LLM

TEXT = Path(__file__).with_suffix(".txt")  # written for this purpose; a changed word makes figures of something else


def perplexity(llm: "LLM", text: str, context: int = 512, second_halves: bool = False) -> tuple[float, int]:
    """exp of the mean negative log-probability of the text's tokens, and how many counted.

    second_halves: only what llama-perplexity counts.
    """
    token_ids = llm.llm_engine.input_processor.prompts.encode(text)
    windows = [token_ids[begin : begin + context] for begin in range(0, len(token_ids), context)]
    windows = [window for window in windows if len(window) > 1]
    first = 1
    if second_halves:
        begins_with = list(llm.get_tokenizer().facts.added.before)
        windows = [begins_with + window[len(begins_with) :] for window in windows if len(window) == context]
        first = context // 2 + 1
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for window, output in zip(windows, llm.generate(windows, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None, output.error
        for token, told in zip(window[first:], output.prompt_logprobs[first:], strict=True):
            assert told is not None
            total -= told[token].logprob
            count += 1
    return math.exp(total / count), count


def of_llama(program: Path, model: str, text: Path, context: int) -> float:
    """What llama-perplexity says of a GGUF file."""
    threads = str(len(os.sched_getaffinity(0)))
    command = [program, "-m", model, "-f", text, "-c", str(context), "-t", threads, "-tb", threads]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"{program} failed ({done.returncode}): {done.stderr[-600:]}")
    return float(found[1])


@engine_options()
def main(
    options: dict[str, object],
    text: Annotated[Path, typer.Option("--text", help="The text, UTF-8.")] = TEXT,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    peer: Annotated[
        Path | None, typer.Option("--peer", help="llama-perplexity, to measure the same .gguf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Perplexity of a model on a fixed text."""
    from pagoda.llm import LLM

    with LLM(**{"enable_prefix_caching": False, "max_model_len": context + 1, **options}) as llm:  # type: ignore[arg-type]
        value, count = perplexity(llm, text.read_text(encoding="utf-8"), context, peer is not None)
    row: dict[str, object] = {"perplexity": round(value, 4), "tokens": count}
    if peer is not None:
        theirs = of_llama(peer, str(options["model"]), text, context)
        row |= {"llama_cpp": theirs, "difference": round(value / theirs - 1, 5)}
    if as_json:
        print(json.dumps({**row, **options}, default=str))
    else:
        beside = f", llama.cpp {row['llama_cpp']:.3f} ({row['difference']:+.2%})" if peer is not None else ""
        print(f"{value:.3f} over {count:,} tokens{beside}")


if __name__ == "__main__":
    typer.run(main)
