"""LLM.beam_search and AsyncLLM.beam_search over a tiny model: vLLM's shapes, several prompts, grammars, errors."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagoda import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, RequestError
from tests.engine.byte_llama import write_byte_llama

PROMPTS: list[Any] = ["the name", {"prompt_token_ids": [5, 9, 77]}, "true"]
PARAMS = BeamSearchParams(beam_width=3, max_tokens=9)
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 64, "num_blocks": 60, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_llama(tmp_path_factory.mktemp("model"))


def test_outputs_have_vllms_shape(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        found = llm.beam_search(PROMPTS, PARAMS)
        assert [len(output.sequences) for output in found] == [3, 3, 3]
        for prompt, output in zip(PROMPTS, found, strict=True):
            ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
            scores: list[float] = []
            for one in output.sequences:
                new = one.tokens[len(ids) :]
                assert one.tokens[: len(ids)] == ids == one.orig_prompt["prompt_token_ids"]
                assert one.orig_prompt.get("prompt") == (prompt if isinstance(prompt, str) else None)
                assert one.text == llm.get_tokenizer().decode(one.tokens)
                chosen = [entries[token].logprob for entries, token in zip(one.logprobs, new, strict=True)]
                assert one.cum_logprob == pytest.approx(sum(chosen))
                scores.append(one.cum_logprob / len(new))
            assert scores == sorted(scores, reverse=True)
            assert len({tuple(one.tokens) for one in output.sequences}) == 3
        assert llm.beam_search(PROMPTS, PARAMS, concurrency_limit=1) == found
        assert llm.beam_search(PROMPTS[1], PARAMS) == found[1:2]
        few: Any = {"choice": ["yes", "no"]}
        (output,) = llm.beam_search("x", BeamSearchParams(3, 9, structured_outputs=few))
        assert {one.text for one in output.sequences} == {"xyes", "xno"}


def test_asyncllm_returns_the_same_beams(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        expected = llm.beam_search(PROMPTS, PARAMS)

    async def main() -> list[BeamSearchOutput]:
        async with AsyncLLM(str(model), **OPTIONS) as llm:
            return await asyncio.gather(*(llm.beam_search(prompt, PARAMS) for prompt in PROMPTS))

    assert asyncio.run(main()) == expected


def test_errors_name_the_field(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        with pytest.raises(RequestError, match="expected BeamSearchParams"):
            llm.beam_search("x", {"beam_width": 2})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="concurrency_limit must be at least 1"):
            llm.beam_search("x", PARAMS, concurrency_limit=0)
        too_wide, fine = llm.beam_search(["x" * 70, "x"], PARAMS)
        assert "64" in (too_wide.error or "")
        assert (too_wide.sequences, fine.error) == ([], None)
