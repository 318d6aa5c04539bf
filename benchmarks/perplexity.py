#!/usr/bin/env python3
"""Perplexity of a model on a fixed text, under any flags of the engine: what a narrower format costs.

usage: perplexity.py [--text perplexity.txt] [--context 512] [--json] [any flag of `pagoda generate`]

The text is cut into windows of `context` tokens, and every token but the first of its window counts. The log-
probabilities are the engine's own (`prompt_logprobs`), so all of it is measured: weights, KV cache, kernels.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.options import engine_options

if TYPE_CHECKING:
    from pagoda.llm import LLM

TEXT = Path(__file__).with_suffix(".txt")  # written for this purpose; a changed word makes figures of something else


def perplexity(llm: "LLM", text: str, context: int = 512) -> tuple[float, int]:
    """exp of the mean negative log-probability of the text's tokens, and how many counted."""
    token_ids = llm.engine.input_processor.prompts.encode(text)
    windows = [token_ids[begin : begin + context] for begin in range(0, len(token_ids), context)]
    windows = [window for window in windows if len(window) > 1]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for window, output in zip(windows, llm.generate(windows, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None, output.error
        for token, told in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert told is not None
            total -= told[token].logprob
            count += 1
    return math.exp(total / count), count


@engine_options()
def main(
    options: dict[str, object],
    text: Annotated[Path, typer.Option("--text", help="The text, UTF-8.")] = TEXT,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Perplexity of a model on a fixed text."""
    from pagoda.llm import LLM

    with LLM(**{"enable_prefix_caching": False, "max_model_len": context + 1, **options}) as llm:  # type: ignore[arg-type]
        value, count = perplexity(llm, text.read_text(encoding="utf-8"), context)
    if as_json:
        print(json.dumps({"perplexity": round(value, 4), "tokens": count, **options}, default=str))
    else:
        print(f"{value:.3f} over {count:,} tokens")


if __name__ == "__main__":
    typer.run(main)
