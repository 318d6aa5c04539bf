"""Beams that follow a grammar: the outputs, order and scores of a search over plain lists, and every schedule's."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.core.request import RequestStatus
from pagoda.engine.engine_core import EngineCore
from tests.core.plain_beam_search import plain_beam_search
from tests.engine.byte_llama import EOS, VOCAB
from tests.engine.driver import drive, request
from tests.engine.test_structured_output import Engines, constrained, engine, model

__all__ = ["engine", "model"]  # fixtures

PROMPT = [5, 9, 77, 120, 14]
WIDTH = 4
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}}, "additionalProperties": False}},
    {"regex": "(ab|a|[c-e]){2,6}"},
    {"choice": ["true", "the name", "then", "no", "name: true", "12"]},
]


def logprobs_after(core: EngineCore, params: SamplingParams, tokens: list[int]) -> list[float]:
    """The log-probability of every token after these, as a request that goes on from there reports them."""
    output = tokens[len(PROMPT) :]
    one = dataclasses.replace(params, n=1, temperature=0, max_tokens=len(output) + 1, logprobs=VOCAB, beam_search=None)
    asked = request(0, PROMPT, one, eos=(EOS,))
    core.add_request(dataclasses.replace(asked, prior_output=(tuple(output),)) if output else asked)
    values = [0.0] * VOCAB
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            if (columns := outputs.logprobs) is not None:
                for token, value in zip(columns.token_ids[0, 1:], columns.logprobs[0, 1:], strict=True):
                    values[token] = float(value)
    return values


@pytest.mark.parametrize("given", GRAMMARS, ids=list(map(str, map(list, GRAMMARS))))
@pytest.mark.parametrize("options", [BeamSearchOptions(), BeamSearchOptions(0.0, "never")], ids=str)
def test_a_search_equals_one_over_plain_lists(
    model: Path, given: dict[str, Any], options: BeamSearchOptions, engine: Engines
) -> None:
    params = constrained(SamplingParams(n=WIDTH, max_tokens=14, logprobs=0, beam_search=options), **given)
    core = engine(model)
    answers = drive(core, [request(0, PROMPT, params, eos=(EOS,))])
    expected = plain_beam_search(PROMPT, params, (EOS,), 14, lambda tokens: logprobs_after(core, params, tokens))
    core.shutdown()
    assert [answers.tokens["r0", i] for i in range(WIDTH)] == [tokens for _, tokens in expected]
    for i, (score, tokens) in enumerate(expected):
        total = sum(answers.logprobs["r0", i])
        assert total / len(tokens) ** options.length_penalty == pytest.approx(score, rel=1e-6)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_grammar_of_fewer_outputs_than_beams_gives_them_all(model: Path, asynchronous: bool, engine: Engines) -> None:
    """The sequences that are left end without a token."""
    params = constrained(SamplingParams(n=WIDTH, max_tokens=14, beam_search=BeamSearchOptions()), choice=["yes", "no"])
    core = engine(model, async_scheduling=asynchronous)
    answers = drive(core, [request(0, PROMPT, params, eos=(EOS,))])
    core.shutdown()
    texts = {bytes(token - 3 for token in tokens[:-1]) for tokens in answers.tokens.values() if tokens}
    assert texts == {b"yes", b"no"}
    assert len(answers.finishes) == WIDTH
    assert {finish.status for finish in answers.finishes.values()} == {RequestStatus.FINISHED_STOPPED}
