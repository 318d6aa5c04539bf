"""Every sampling parameter at both ends of what is accepted: an answer, or an error that blames the request."""

import dataclasses
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagoda import LLM
from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutputKind
from pagoda.base.param_values import MAX_COUNT, read_flag, read_integer, read_number, read_optional_integer
from pagoda.base.sampling_params import _READERS, BeamSearchOptions, SamplingParams, SpeechRules
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


@pytest.mark.parametrize("seed", range(6))
def test_several_parameters_at_their_ends(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    num_answered = 0
    for _ in range(50):
        names = rng.sample([name for name in fields() if name not in ("n", "beam_search")], rng.randint(2, 6))
        num_answered += outcome(llm, **{name: rng.choice(ends_of(name)) for name in names}) == "answered"
    assert num_answered > 3
