"""Images in the messages of a server's clients, with a tiny model that sees: answers, refusals, a crash."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.engine.images.families import image_of, write_model
from tests.server.live import FAKE_FLAGS, LiveServer, serving

FLAGS = (
    *("--dtype", "float32", "--device", "cpu", "--threads", "1", "--num-blocks", "400", "--block-size", "8"),
    *("--max-model-len", "1024", "--served-model-name", "tiny", "--allowed-media-domains", "localhost"),
)
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
ALL: dict[str, Any] = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("vision")
    model = write_model("idefics3", folder)
    with serving(folder, "--model", str(model), *FLAGS, stepped=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def data_url(width: int, height: int, seed: int = 0) -> str:
    file = io.BytesIO()
    image_of(width, height, seed).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asking(*content: str) -> list[dict[str, Any]]:
    parts = [
        {"type": "image_url", "image_url": {"url": one, "detail": "low"}}
        if one.startswith(("data:", "http"))
        else {"type": "text", "text": one}
        for one in content
    ]
    return [{"role": "user", "content": parts}]


def test_the_openai_client_sends_images(client: OpenAI, server: LiveServer) -> None:
    messages: Any = asking("what is", data_url(70, 41), "and", data_url(31, 90, 1), "?")
    whole = client.chat.completions.create(messages=messages, **GREEDY, **ALL)
    again = client.chat.completions.create(messages=messages, stream=True, **GREEDY, **ALL)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in again) == whole.choices[0].message.content
    status, counted = server.post("/tokenize", {"messages": messages})
    assert (status, counted["count"]) == (200, whole.usage.prompt_tokens)  # type: ignore[union-attr]
    assert counted["tokens"] == whole.model_extra["prompt_token_ids"]  # type: ignore[index]
    other: Any = asking("what is", data_url(70, 41, 5), "and", data_url(31, 90, 1), "?")
    unlike = client.chat.completions.create(messages=other, **GREEDY, **ALL)
    assert unlike.model_extra["prompt_token_ids"] == counted["tokens"]  # type: ignore[index]
    assert unlike.choices[0].message.content != whole.choices[0].message.content


def test_metrics_tell_which_images_were_encoded_before(client: OpenAI, server: LiveServer) -> None:
    """The text before the image differs, so that the prefix cache does not have its tokens."""
    counts = []
    for text in ("one", "two", "three"):
        messages: Any = asking(text, data_url(33, 44, 9), "?")
        client.chat.completions.create(messages=messages, **GREEDY)
        counts.append([server.metric(f"mm_cache_{name}_total") for name in ("queries", "hits")])
    first, second, third = counts
    tiles = second[0] - first[0]
    assert tiles > 0
    assert [b - a for a, b in zip(first, second, strict=True)] == [b - a for a, b in zip(second, third, strict=True)]
    assert second[1] - first[1] == tiles


def test_the_example_asks_about_its_drawing(server: LiveServer) -> None:
    command = [sys.executable, "examples/images.py", f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, counted, again, cached = done.stdout.splitlines()
    assert first.removeprefix("first") == again.removeprefix("again")
    assert counted.endswith("the prefix cache had 0")
    assert int(cached.rpartition(" ")[2]) > 0


def test_tools_grammars_and_several_outputs(client: OpenAI) -> None:
    messages: Any = asking(data_url(40, 40), "?")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        messages=messages, response_format=form, n=2, logprobs=True, seed=3, model="tiny", max_tokens=40
    )
    assert [json.loads(choice.message.content or "")["a"] in (1, 2) for choice in answer.choices] == [True, True]
    tool: Any = {"type": "function", "function": {"name": "see", "parameters": schema}}
    called = client.chat.completions.create(
        messages=messages, tools=[tool], tool_choice="required", **GREEDY | {"max_tokens": 80}
    )
    assert called.choices[0].message.tool_calls[0].function.name == "see"  # type: ignore[index]


def test_what_cannot_be_read_is_a_400_that_names_the_part(client: OpenAI, server: LiveServer) -> None:
    for url, error in (
        ("data:image/png;base64,AAAA", "not a PNG, JPEG, WebP or GIF image"),
        ("https://example.com/a.png", "images of example.com are not allowed"),
        ("http://localhost:9/a.png", "has no public address"),
    ):
        messages: Any = asking("x", url)
        with pytest.raises(BadRequestError, match=error) as caught:
            client.chat.completions.create(messages=messages, **GREEDY)
        assert caught.value.param == "messages[0].content[1]"
    few = {"messages": asking(data_url(40, 40)), "truncate_prompt_tokens": 3, **GREEDY}
    assert server.post("/v1/chat/completions", few)[0] == 400
    wide = {"messages": asking(*[data_url(96, 96)] * 24), **GREEDY}
    status, answer = server.post("/v1/chat/completions", wide)
    assert status == 400
    assert "maximum context length is 1024 tokens" in answer["error"]["message"]
    assert server.wait_idle()["server_load"] == 0


def test_a_crash_of_the_engine_loses_no_image(client: OpenAI, server: LiveServer) -> None:
    """Killed in the middle of a prompt with images, and in the middle of answers: the same tokens as without."""
    conversations: list[Any] = [
        asking(data_url(70, 41, seed), "tell", data_url(31, 90, seed), "?") for seed in range(3)
    ]

    def ask(messages: Any) -> Any:
        answer = client.chat.completions.create(messages=messages, **GREEDY | {"max_tokens": 20}, **ALL)
        return answer.choices[0].model_extra["token_ids"]  # type: ignore[index]

    expected = [ask(messages) for messages in conversations]
    assert len({tuple(tokens) for tokens in expected}) == 3
    for steps in (1, 8):
        server.post("/reset_prefix_cache", {})
        server.steps.hold_after(steps)
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask, messages) for messages in conversations]
            server.steps.wait_held()
            server.kill_engine()
            server.steps.release()
            assert [one.result(120) for one in asked] == expected


def test_a_model_for_text_refuses_images_by_its_name(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE_FLAGS, "--served-model-name", "words") as server:
        status, answer = server.post("/v1/chat/completions", {"messages": asking("x", data_url(8, 8))})
    assert status == 400
    assert "messages[0].content[1] is an image, but words takes text only" in answer["error"]["message"]
