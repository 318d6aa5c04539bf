"""Beam search over HTTP: vLLM's fields, the best output first, what is refused, and a kill in the middle of it."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.server.live import LiveServer

TEXT: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "use_beam_search": True, "n": 3}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "use_beam_search": True}
COLOUR = {"properties": {"colour": {"enum": ["red", "green", "blue"]}}, "required": ["colour"]}
SCHEMA = {"type": "object", **COLOUR, "additionalProperties": False}
IN_JSON: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name the colour of grass as JSON."}],
    "max_tokens": 24,
    "use_beam_search": True,
    "n": 2,
    "guided_json": SCHEMA,
}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": ["x"]}, "stop"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": "never"}, "early_stopping"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    fake_server: LiveServer, fields: dict[str, Any], named: str
) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        status, answer = fake_server.post(path, {**body, **fields})
        assert (status, answer["error"]["param"]) == (400, named), answer


def choices(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, answer = server.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert status == 200, answer
    assert len(answer["choices"]) == body["n"]
    return answer["choices"]


def test_a_worker_without_log_probabilities_refuses_it(fake_server: LiveServer) -> None:
    body = {"prompt": "Once", "max_tokens": 3, "use_beam_search": True, "n": 2}
    status, answer = fake_server.post("/v1/completions", body)
    assert status == 400
    assert "beam search needs" in answer["error"]["message"]


def test_the_best_output_is_the_first_choice(real_server: LiveServer) -> None:
    body = {**TEXT, "logprobs": 1, "temperature": 0}
    found = choices(real_server, body)
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in found]
    assert scores == sorted(scores, reverse=True)
    assert "Paris" in found[0]["text"]
    assert {len(choice["logprobs"]["tokens"]) for choice in found} == {6}
    assert choices(real_server, body) == found


def test_a_kill_in_the_middle_of_searches_changes_nothing(real_server: LiveServer) -> None:
    """Of a text, and of a chat whose beams follow a grammar: they begin again, and give what they would have given.

    They send nothing before they are done.
    """
    bodies = [{**TEXT, "max_tokens": 24, "logprobs": 1}, IN_JSON]
    undisturbed = [choices(real_server, body) for body in bodies]
    for choice in undisturbed[1]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    restarts = real_server.load()["engine_restarts"]
    real_server.wait_idle()
    with ThreadPoolExecutor(2) as pool, real_server.steps.held_after(12):  # the prompts, and some tokens of each beam
        asked = [pool.submit(choices, real_server, body) for body in bodies]
        real_server.steps.wait_held()
        assert not asked[0].done()
        real_server.kill_engine()
        real_server.steps.release()
        assert [one.result() for one in asked] == undisturbed
    assert real_server.wait_idle()["engine_restarts"] == restarts + 1
