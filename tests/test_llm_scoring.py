"""Prompts that are only scored (max_tokens 0), up to the model's whole context, in Python."""

from typing import Any

import numpy as np
import pytest

from pagoda import LLM, RequestError, RequestOutput, SamplingParams
from pagoda.base.sampling_params import BeamSearchOptions
from tests.engine.byte_llama import write_byte_llama

LEN = 64
IDS: list[int] = np.random.default_rng(3).integers(0, 256, LEN + 1).tolist()
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_blocks": 60, "max_num_seqs": 4}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_byte_llama(tmp_path_factory.mktemp("model")))


def score(model: str, max_model_len: int, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    with LLM(model, max_model_len=max_model_len, **OPTIONS, **options) as llm:
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], SCORED)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 21},
        {"max_num_batched_tokens": 9, **NGRAM},
        pytest.param({"pipeline_parallel_size": 2, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["whole", "chunks", "drafts", "stages", "ranks"],
)
def test_a_prompt_that_fills_the_context_scores_as_in_a_longer_one(model: str, options: dict[str, Any]) -> None:
    prompts = [IDS[:LEN], IDS[: LEN - 1]]
    found = score(model, LEN, prompts, **options)
    longer = score(model, 2 * LEN, prompts, **options)
    for ids, one, other in zip(prompts, found, longer, strict=True):
        assert one.error is None
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == len(ids)
        assert (one.outputs[0].token_ids, one.outputs[0].text) == ([], "")
        assert one.outputs[0].finish_reason == "length"


def test_what_is_longer_or_wants_a_token_is_refused(model: str) -> None:
    with LLM(model, max_model_len=LEN, **OPTIONS) as llm:
        full: Any = {"prompt_token_ids": IDS[:LEN]}
        for prompt, params in (
            ({"prompt_token_ids": IDS}, SCORED),
            (full, SamplingParams(max_tokens=1, prompt_logprobs=2)),
            (full, SamplingParams(max_tokens=None)),
        ):
            with pytest.raises(RequestError, match=f"maximum context length is {LEN} tokens") as refused:
                llm.generate(prompt, params)  # type: ignore[arg-type]
            assert ("output included" in str(refused.value)) == (params is not SCORED)
        both = llm.generate(full, SamplingParams(n=2, max_tokens=0, prompt_logprobs=0))[0]
        assert [one.token_ids for one in both.outputs] == [[], []]
        cut = SamplingParams(max_tokens=0, prompt_logprobs=0, truncate_prompt_tokens=-1)
        assert llm.generate({"prompt_token_ids": IDS}, cut)[0].prompt_token_ids == IDS[1:]  # type: ignore[arg-type]


def test_a_beam_search_does_not_only_score() -> None:
    with pytest.raises(RequestError, match="at least 1 in a beam search"):
        SamplingParams(n=2, max_tokens=0, beam_search=BeamSearchOptions())
