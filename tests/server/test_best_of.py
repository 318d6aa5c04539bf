"""`best_of`: of several outputs, those with the highest mean log-probability per token are returned."""

from typing import Any

import pytest

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.server.dialects.openai.completions import best_of
from pagoda.server.turn import Piece
from tests.server.live import LiveServer

BODY: dict[str, Any] = {"prompt": ["Once", "Twice"], "max_tokens": 5, "seed": 3, "temperature": 1.0}


def choices_of(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    status, answer = server.post("/v1/completions", {**BODY, **fields})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 5  # every output that was generated counts
    return answer["choices"]


def mean_logprob(choice: dict[str, Any]) -> float:
    values = choice["logprobs"]["token_logprobs"]
    return sum(values) / len(values)


def test_the_best_of_all_outputs_are_returned_best_first(real_server: LiveServer) -> None:
    every = choices_of(real_server, n=4, logprobs=0)
    best = choices_of(real_server, n=2, best_of=4, logprobs=0)
    assert [choice["index"] for choice in best] == [0, 1, 2, 3]
    for number in range(2):
        ranked = sorted(every[4 * number : 4 * number + 4], key=mean_logprob, reverse=True)
        assert [choice["text"] for choice in best[2 * number : 2 * number + 2]] == [one["text"] for one in ranked[:2]]


def test_log_probabilities_are_not_sent_unless_asked_for(real_server: LiveServer) -> None:
    asked = choices_of(real_server, best_of=4, logprobs=0)
    plain = choices_of(real_server, best_of=4)
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in asked]
    assert [choice["logprobs"] for choice in plain] == [None, None]


@pytest.mark.parametrize(("num_kept", "expected"), [(1, [2, 5]), (2, [2, 0, 5, 3])])
def test_length_does_not_count_against_an_output(num_kept: int, expected: list[int]) -> None:
    lengths = ((0, -4.0, 2), (1, -5.0, 1), (2, -6.0, 6))
    outputs = [
        Piece(prompt, RequestOutput("a"), CompletionOutput(at, "", [7] * num_tokens, cumulative), [])
        for prompt in range(2)
        for at, cumulative, num_tokens in lengths
    ]
    assert [3 * piece.prompt + piece.output.index for piece in best_of(outputs, num_kept)] == expected
