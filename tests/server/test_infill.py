"""Fill in the middle over HTTP: suffix of completions, llama.cpp's /infill, Ollama's suffix."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagoda.engine.inputs.infill import FAMILIES
from tests.engine.inputs.test_infill import names_of, tokenizer_of
from tests.server.live import FAKE_FLAGS, LiveServer, serving

NAMES = FAMILIES["Qwen Coder"]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose tokenizer has a token per byte, and those of Qwen Coder."""
    folder: Path = tmp_path_factory.mktemp("coder")
    backend = tokenizer_of(num_words=48_000).backend  # those that the fake executor draws, too
    backend.add_special_tokens(names_of(NAMES))
    backend.save(str(folder / "tokenizer.json"))
    with serving(folder, *FAKE_FLAGS, "--ollama", "--tokenizer", str(folder)) as server:
        yield server


def test_suffix_of_openais_completions(coder: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{coder.url}/v1", api_key="none")
    asked: Any = {"model": "smollm2-135m", "prompt": "def f(", "suffix": "):", "max_tokens": 9, "seed": 1}
    answer = client.completions.create(**asked, extra_body={"return_token_ids": True})
    given = answer.choices[0].model_extra
    assert given is not None
    _, text = coder.post("/detokenize", {"tokens": given["prompt_token_ids"]})
    assert text["prompt"] == f"{NAMES.prefix}def f({NAMES.suffix}):{NAMES.middle}"
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(one.choices[0].text for one in streamed) == answer.choices[0].text != ""
    two = client.completions.create(**{**asked, "prompt": ["def f(", "x"]})
    assert two.choices[0].text == answer.choices[0].text
    plain = client.completions.create(**{**asked, "suffix": ""}, extra_body={"return_token_ids": True})
    assert len((plain.choices[0].model_extra or {})["prompt_token_ids"]) == len("def f(")


def test_infill_of_llama_cpp(coder: LiveServer) -> None:
    body = {"input_prefix": "def ", "prompt": "f(", "input_suffix": "):", "n_predict": 9, "seed": 1}
    status, whole = coder.post("/infill", {**body, "samplers": ["top_k"], "cache_prompt": True})
    assert status == 200
    assert (whole["stop"], whole["stop_type"], whole["stopping_word"], whole["truncated"]) == (True, "limit", "", False)
    assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (len("def f():") + 3, 9)
    assert whole["timings"]["predicted_n"] == 9
    asked: Any = {"prompt": "def f(", "suffix": "):", "max_tokens": 9, "seed": 1}
    assert coder.post("/v1/completions", asked)[1]["choices"][0]["text"] == whole["content"]
    request = urllib.request.Request(f"{coder.url}/infill", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        events = [json.loads(line.removeprefix(b"data: ")) for line in response if line.strip()]
    assert "".join(one["content"] for one in events) == whole["content"]
    assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == 9


def test_what_does_not_fit_is_cut_by_infill_and_refused_by_completions(coder: LiveServer) -> None:
    extra = [{"filename": "a.py", "text": "x" * 5000}]
    long = {"input_prefix": "a" * 5000, "input_suffix": "b" * 5000, "input_extra": extra}
    assert coder.post("/infill", {**long, "n_predict": 8})[1]["tokens_evaluated"] == 2048 - 8
    assert coder.post("/infill", long)[1]["tokens_evaluated"] == 2048 - 512
    assert coder.post("/infill", {**long, "n_predict": 2000, "stop": "e"})[1]["tokens_evaluated"] == 2048 - 1024
    assert coder.post("/infill", {**long, "n_predict": 0})[1]["tokens_predicted"] == 0
    status, answer = coder.post("/v1/completions", {"prompt": "a" * 5000, "suffix": "b", "max_tokens": 8})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "maximum context length" in answer["error"]["message"]


def test_suffix_of_ollama(coder: LiveServer) -> None:
    body = {"model": "smollm2-135m", "prompt": "def f(", "suffix": "):", "stream": False}
    status, answer = coder.post("/api/generate", {**body, "options": {"num_predict": 9, "seed": 1}})
    assert (status, answer["prompt_eval_count"]) == (200, len("def f():") + 3)
    status, answer = coder.post("/api/generate", {**body, "system": "x"})
    assert (status, answer["error"]) == (
        400,
        "system: is not for prompts with suffix; leave system or suffix out",
    )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": [1, 2], "suffix": "x"}, "prompt", "must be a text"),
        ({"prompt": "x", "suffix": "x", "echo": True}, "echo", "leave it out"),
        ({"prompt": ["x"] * 9, "suffix": "x" * 200_000}, "suffix", "1048576"),
        ({"prompt": "x", "suffix": 5}, "suffix", "expected a string"),
    ],
)
def test_what_is_asked_wrongly_names_the_field(coder: LiveServer, body: Any, param: str, message: str) -> None:
    status, answer = coder.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]


def test_a_model_without_the_tokens_says_so(fake_server: LiveServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "x", "suffix": "y"}), ("/infill", {"input_suffix": "y"})):
        status, answer = fake_server.post(path, body)
        assert status == 400
        assert answer["error"]["param"] in ("suffix", "input_suffix")
        assert "has no tokens for filling in the middle" in answer["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "x"}], "suffix": "y"}
    assert "belongs to /v1/completions" in fake_server.post("/v1/chat/completions", chat)[1]["error"]["message"]
