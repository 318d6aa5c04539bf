"""Every sampling parameter at both ends of what is accepted: an answer, or an error that blames the request."""

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagoda import LLM
from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutputKind
from pagoda.base.param_values import MAX_COUNT, read_flag, read_integer, read_number, read_optional_integer
from pagoda.base.sampling_params import _READERS, BeamSearchOptions, PromptReasoning, SamplingParams, SpeechRules
from tests.device_under_test import DeviceUnderTest
from tests.engine.byte_llama import VOCAB, write_byte_llama

LEAST, MOST = math.ulp(0.0), 3.4028234e38
"""The ends of positive floats; as float32, the first is 0."""
ANY_LENGTH = (0, 1, VOCAB - 1, VOCAB, MAX_COUNT)
STRINGS: tuple[Any, ...] = ((), ("\0",), ("a", "\U0010ffff" * 100), tuple(map(chr, range(32, 96))))
ENDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, LEAST, 1e-45, 9.9e-6, 1e-5, 1e-4, 1e30, MOST),
    "top_k": (-1, 0, 1, VOCAB - 1, VOCAB, MAX_COUNT),
    "stop": STRINGS,
    "bad_words": STRINGS,
    "stop_token_ids": ((), ANY_LENGTH[:3], ANY_LENGTH, tuple(range(VOCAB))),
    "bad_words_token_ids": ((), ((0,), (1, 2), (VOCAB - 1,) * 3), ((MAX_COUNT,),), tuple((i,) for i in range(VOCAB))),
    "allowed_token_ids": (None, (0,), (VOCAB - 1,), ANY_LENGTH, range(VOCAB)),
    "logit_bias": ({}, {0: 100, 1: -100}, {MAX_COUNT: 1}, dict.fromkeys(range(VOCAB), -100.0), {5: LEAST}),
    "truncate_prompt_tokens": (None, -1, 1, MAX_COUNT),
    "logprob_token_ids": (None, (), (0, 0, VOCAB - 1), ANY_LENGTH, range(VOCAB)),
    "truncation_side": (None, "left", "right"),
    "structured_outputs": (None, {"choice": ["a", "b" * 500]}, {"regex": ".*"}, {"json_object": True}),
    "grammar": (None,),  # the engine's own
    "beam_search": (None, BeamSearchOptions(-10.0), BeamSearchOptions(10.0, "never")),
    "speech": (
        None,
        SpeechRules((0,), (1,), 200, 210),
        SpeechRules(tuple(range(VOCAB))),
        SpeechRules(end_id=MAX_COUNT),
    ),
    "thinking_token_budget": (None, -1, 0, 1, MAX_COUNT),
    "reasoning": (None, PromptReasoning("think", False), PromptReasoning("think", True)),  # of chats
    "output_kind": (None, *RequestOutputKind),
}


def ends_of(name: str) -> tuple[Any, ...]:
    """Return values at and near the ends of what a parameter's reader takes; other readers have a row in ENDS."""
    reader = _READERS[name]
    if name in ENDS:
        return ENDS[name]
    if reader is read_flag:
        return False, True
    assert isinstance(reader, partial), f"say in ENDS what the ends of {name} are"
    low, high = reader.keywords["low"], reader.keywords.get("high")
    if reader.func is read_number:
        return (
            low,
            low + LEAST,
            math.nextafter(low, 9),
            low + 1e-45,
            low + 1e-38,
            (low + min(high or 9, 9)) / 2,
            high or MOST,
        )
    assert reader.func in (read_integer, read_optional_integer)
    return *((None,) if reader.func is read_optional_integer else ()), low, low + 1, high or MAX_COUNT


def test_the_whole_vocabulary_may_be_reported(tmp_path: Path, on: DeviceUnderTest) -> None:
    sizes = {"threads": 1, "block_size": 8, "num_blocks": 60, "max_model_len": 64, "max_num_seqs": 8}
    with LLM(str(write_byte_llama(tmp_path)), max_logprobs=-1, **on.engine({"device": "cpu", **sizes})) as llm:
        [answer] = llm.generate([5, 6], SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1), use_tqdm=False)
        with pytest.raises(RequestError, match=f"max_logprobs, which is {VOCAB}"):
            llm.generate([5, 6], SamplingParams(logprobs=VOCAB + 1), use_tqdm=False)
    assert answer.outputs[0].logprobs is not None
    assert answer.prompt_logprobs is not None
    for entry in (*answer.outputs[0].logprobs, answer.prompt_logprobs[1] or {}):
        assert len(entry) == VOCAB
        assert sum(math.exp(one.logprob) for one in entry.values()) == pytest.approx(1, abs=1e-4)


def test_processed_logprobs_are_those_of_what_is_sampled_from(tmp_path: Path, on: DeviceUnderTest) -> None:
    sizes = {"threads": 1, "block_size": 8, "num_blocks": 60, "max_model_len": 64, "max_num_seqs": 8}
    options = {"logprobs_mode": "processed_logprobs", **on.engine({"device": "cpu", **sizes})}
    params = SamplingParams(temperature=0.7, top_k=2, logit_bias={9: 100}, max_tokens=3, logprobs=3, prompt_logprobs=3)
    with LLM(str(write_byte_llama(tmp_path)), **options) as llm:
        [answer] = llm.generate([[5, 6]], params, use_tqdm=False)
    assert answer.outputs[0].logprobs is not None
    for entry in answer.outputs[0].logprobs:
        by_rank = sorted(one.logprob for one in entry.values())
        assert by_rank[-1] == pytest.approx(entry[9].logprob)
        assert sum(math.exp(one) for one in by_rank[-2:]) == pytest.approx(1, abs=1e-5)
        assert by_rank[0] == -9999.0
    assert answer.prompt_logprobs is not None
    assert all(one.logprob > -99 for one in (answer.prompt_logprobs[1] or {}).values())


def test_chosen_tokens_are_reported_in_place_of_the_most_likely(llm: LLM) -> None:
    """With the values that all of the vocabulary would have, whatever the neighbours ask for."""
    chosen = SamplingParams(max_tokens=4, seed=1, n=2, logprob_token_ids=(9, 100, 9), logprobs=2, presence_penalty=1.0)
    others = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, logprobs=20), replace(chosen, n=1)]
    answers = llm.generate([[5, 6]] * 4, [chosen, *others], use_tqdm=False)
    for output in (*answers[0].outputs, answers[3].outputs[0]):
        assert output.logprobs is not None
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert list(entry) == [*dict.fromkeys((token, 9, 100))]
            assert all(entry[i].rank is None for i in (9, 100) if i != token)
    assert answers[0].outputs[0].logprobs == answers[3].outputs[0].logprobs
    steps = [[entry[9].logprob, entry[100].logprob] for entry in answers[3].outputs[0].logprobs or []]
    biased = {"logit_bias": {9: 100}, "temperature": 0, "max_tokens": 1, "logprobs": 0}
    [alone] = llm.generate([[5, 6]], SamplingParams(**biased), use_tqdm=False)
    assert alone.outputs[0].logprobs is not None
    assert alone.outputs[0].logprobs[0][9].logprob == pytest.approx(steps[0][0], abs=1e-5)
    for given in ({"logprob_token_ids": [VOCAB]}, {"logprob_token_ids": [1], "logprobs": 5}):
        with pytest.raises(RequestError, match="logprob"):
            llm.generate([[5]], SamplingParams(**given), use_tqdm=False)  # type: ignore[arg-type]


def fields() -> list[str]:
    return [item.name for item in dataclasses.fields(SamplingParams)]


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, on: DeviceUnderTest) -> Iterator[LLM]:
    folder: Path = write_byte_llama(tmp_path_factory.mktemp("bytes"))
    sizes = {"threads": 1, "block_size": 8, "num_blocks": 60, "max_model_len": 64, "max_num_seqs": 8}
    with LLM(str(folder), **on.engine({"device": "cpu", "kernels": request.param, **sizes})) as llm:
        yield llm


def outcome(llm: LLM, **given: Any) -> str:
    """Return "refused" or why the output ended; every other end of a request is an error."""
    try:
        params = SamplingParams(**{"max_tokens": 6, "seed": 1, **given})
        [answer] = llm.generate(list(range(3, 43)), params, use_tqdm=False)
    except RequestError as error:
        if "not finite" in str(error):
            raise AssertionError(given) from error
        return "refused"
    reasons = {output.finish_reason for output in answer.outputs}
    assert reasons <= {"stop", "length"}, (answer.error, given)
    assert len(answer.outputs) == params.n
    return "answered"


@pytest.mark.parametrize("name", fields())
def test_each_parameter_at_its_ends(llm: LLM, name: str) -> None:
    outcomes = [outcome(llm, **{name: value}) for value in ends_of(name)]
    assert "answered" in outcomes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_several_parameters_at_their_ends(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    num_answered = 0
    for _ in range(50):
        names = rng.sample([name for name in fields() if name not in ("n", "beam_search")], rng.randint(2, 6))
        num_answered += outcome(llm, **{name: rng.choice(ends_of(name)) for name in names}) == "answered"
    assert num_answered > 3
