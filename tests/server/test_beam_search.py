"""Beam search over HTTP: vLLM's fields, the best output first, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.cached_models import cached_model
from tests.server.live import LiveServer, serving

TEXT: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "use_beam_search": True, "n": 3}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "use_beam_search": True}


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


def test_the_best_output_is_the_first_choice(tmp_path: Path) -> None:
    cached_model("smollm2-135m")
    with serving(tmp_path, "--max-model-len", "256", "--max-num-seqs", "8") as server:
        body = {**TEXT, "logprobs": 1, "temperature": 0}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
        assert scores == sorted(scores, reverse=True)
        assert "Paris" in answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 3 * 6
        assert server.post("/v1/completions", body)[1]["choices"] == answer["choices"]
        status, answer = server.post("/v1/chat/completions", {**CHAT, "n": 2})
        assert status == 200, answer
        assert len(answer["choices"]) == 2
