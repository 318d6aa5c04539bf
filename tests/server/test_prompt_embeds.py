"""Prompts as embeddings over HTTP: which forms are taken, in which order they are answered, and what is refused."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.engine.byte_llama import write_byte_llama
from tests.server.live import FAKE_FLAGS, LiveServer, serving
from tests.server.test_routes import events

HIDDEN = 576
FLAGS = ("--dtype", "float32", "--num-blocks", "400", "--block-size", "8", "--max-model-len", "512")


def encoded(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def as_safetensors(tensor: torch.Tensor) -> str:
    return base64.b64encode(save({"x": tensor})).decode()


def embeds(count: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Without a model: the tokens are the fake executor's."""
    with serving(tmp_path_factory.mktemp("server"), *FAKE_FLAGS, "--enable-prompt-embeds") as server:
        yield server


def complete(server: LiveServer, **body: Any) -> Any:
    status, answer = server.post("/v1/completions", {"max_tokens": 6, "seed": 1, **body})
    assert status == 200, answer
    return answer


def refused(server: LiveServer, **body: Any) -> tuple[str, str]:
    status, answer = server.post("/v1/completions", {"max_tokens": 6, **body})
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


def test_embeddings_come_before_prompts(server: LiveServer) -> None:
    one = complete(server, prompt_embeds=encoded(embeds(5)))
    assert one["usage"]["prompt_tokens"] == 5
    several = complete(
        server,
        prompt_embeds=[encoded(embeds(5)), as_safetensors(embeds(7).bfloat16())],
        prompt=["a text", "another one"],
        return_token_ids=True,
        n=2,
    )
    assert [choice["index"] for choice in several["choices"]] == list(range(8))
    lengths = [len(choice["prompt_token_ids"]) for choice in several["choices"]]
    assert lengths[:4] == [5, 5, 7, 7]
    assert set(several["choices"][0]["prompt_token_ids"]) == {0}
    texts = complete(server, prompt=["a text", "another one"], n=2)
    assert [choice["text"] for choice in several["choices"]][4:] == [choice["text"] for choice in texts["choices"]]
    for nothing in (None, "", []):
        assert complete(server, prompt_embeds=encoded(embeds(5)), prompt=nothing)["choices"] == one["choices"]
        assert (
            complete(server, prompt=["a text", "another one"], n=2, prompt_embeds=nothing)["choices"]
            == (texts["choices"])
        )
    streamed = events(server, "/v1/completions", {"prompt_embeds": encoded(embeds(5)), "max_tokens": 6, "seed": 1})
    said = [choice["text"] for event in streamed for choice in event["choices"]]  # type: ignore[attr-defined]
    assert "".join(said) == one["choices"][0]["text"]


BAD = {
    "base64": ("%%%", "not valid base64"),
    "file": (base64.b64encode(b"nothing that is known").decode(), "neither a safetensors file nor what torch.save"),
    "hidden size": (encoded(embeds(3, 4)), f"expected (number of tokens, {HIDDEN})"),
    "nan": (encoded(embeds(3) * float("nan")), "not finite"),
    "sparse": (encoded(embeds(3).to_sparse()), "to_dense"),
    "integers": (encoded(torch.zeros(3, HIDDEN, dtype=torch.int64)), "another type"),
    "too long": (as_safetensors(torch.zeros(2100, HIDDEN, dtype=torch.float16)), "context length is 2048 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_input(server: LiveServer, name: str) -> None:
    data, message = BAD[name]
    param, said = refused(server, prompt_embeds=[encoded(embeds(2)), data])
    assert param == "prompt_embeds[1]"
    assert message in said
    param, _ = refused(server, prompt_embeds=data, prompt="x")
    assert param == "prompt_embeds"


def test_what_has_no_meaning_is_refused(server: LiveServer, fake_server: LiveServer) -> None:
    given = encoded(embeds(3))
    assert refused(server, prompt_embeds=given, echo=True)[0] == "echo"
    assert refused(server, prompt_embeds=given, prompt_logprobs=0)[0] == "prompt_logprobs"
    assert refused(server)[0] == "prompt"
    assert refused(server, prompt_embeds={"a": 1})[0] == "prompt_embeds"
    assert refused(server, prompt_embeds=["AAAA"] * 1025)[0] == "prompt"
    param, said = refused(fake_server, prompt_embeds=given)
    assert param == "prompt_embeds"
    assert "enable_prompt_embeds" in said
    chat = {"messages": [{"role": "user", "content": "Hi"}], "prompt_embeds": given}
    status, answer = server.post("/v1/chat/completions", chat)
    assert (status, answer["error"]["param"]) == (400, "prompt_embeds")
    assert "/v1/completions" in answer["error"]["message"]


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    """Return a body whose message has these parts: texts, and embeddings as base64."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "prompt_embeds", "data": part[0]}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "seed": 1, **more}


def test_parts_of_messages(server: LiveServer) -> None:
    """Among texts, in whole answers, streams, batches, and where tokens are counted or pooled."""
    given, large = encoded(embeds(5)), as_safetensors(embeds(1900))
    assert len(large) > 4_500_000  # more than the texts of a conversation may have
    body = chat("See", (given,), "and", (encoded(embeds(7)),), "!", return_token_ids=True, n=2)
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    text = chat("See", "", "and", "", "!", return_token_ids=True)
    plain = server.post("/v1/chat/completions", text)[1]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 12
    assert answer["prompt_token_ids"].count(0) == 12
    streamed = events(server, "/v1/chat/completions", body)
    deltas = [choice for event in streamed for choice in event["choices"]]  # type: ignore[attr-defined]
    for choice in answer["choices"]:
        pieces = [one["delta"].get("content") or "" for one in deltas if one["index"] == choice["index"]]
        assert "".join(pieces) == choice["message"]["content"]
    status, found = server.post("/v1/chat/completions", chat((large,)))
    assert (status, found["usage"]["prompt_tokens"] > 1900) == (200, True)
    each = [chat("See", (encoded(embeds(count)),))["messages"] for count in (3, 4)]
    status, found = server.post("/v1/chat/completions/batch", {"messages": each, "max_tokens": 3})
    assert (status, len(found["choices"])) == (200, 2)
    status, found = server.post("/tokenize", {"messages": body["messages"]})
    assert (status, found["tokens"]) == (200, answer["prompt_token_ids"])


def test_errors_name_the_part(server: LiveServer, fake_server: LiveServer) -> None:
    for data, message in BAD.values():
        status, answer = server.post("/v1/chat/completions", chat("See", (data,)))
        assert status == 400
        if "context length" not in message:  # which is of the whole prompt
            assert (answer["error"]["param"], message in answer["error"]["message"]) == ("messages[0].content[1]", True)
    for data in (None, 7, ["a"], {"a": {}}):
        status, answer = server.post("/v1/chat/completions", chat("See", (data,)))
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")
    status, answer = fake_server.post("/v1/chat/completions", chat((encoded(embeds(2)),)))
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0]")
    assert "enable_prompt_embeds" in answer["error"]["message"]
    status, answer = server.post("/v1/chat/completions", chat((encoded(embeds(2)),), prompt_logprobs=1, logprobs=True))
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_truncation(server: LiveServer) -> None:
    answer = complete(server, prompt_embeds=encoded(embeds(40)), truncate_prompt_tokens=9)
    assert answer["usage"]["prompt_tokens"] == 9


def test_others_are_answered_while_large_embeddings_are_read(server: LiveServer) -> None:
    """That they are decoded on a thread is tested with the engine, where it does not depend on how fast that is."""
    body = json.dumps({"prompt_embeds": as_safetensors(embeds(2000)), "max_tokens": 1}).encode()
    assert len(body) > 6_000_000
    said: list[Any] = []
    sending = [threading.Thread(target=lambda: said.append(server.post("/v1/completions", body)[0])) for _ in range(2)]
    for thread in sending:
        thread.start()
    while any(thread.is_alive() for thread in sending):
        assert server.get("/ping")[0] == 200
    assert said == [200, 200]
    server.wait_idle()


def test_requests_outlive_a_killed_engine_and_end_when_aborted(tmp_path: Path) -> None:
    """The journal has the embeddings: a request gets what it gets undisturbed, and what its tokens get."""
    model = write_byte_llama(tmp_path / "model")
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    ids = list(range(10, 70))
    common = {"max_tokens": 140, "seed": 5, "temperature": 1, "n": 2, "ignore_eos": True, "return_token_ids": True}

    def tokens(server: LiveServer, **body: Any) -> list[list[int]]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, answer = server.post(path, {**common, **body})
        assert status == 200, answer
        return [choice["token_ids"] for choice in answer["choices"]]

    template = "{% for m in messages %}{{ m.content | replace('\n', '') }}{% endfor %}"  # the line between parts
    text = bytes(one - 3 for one in ids[50:]).decode()
    flags = ("--model", str(model), *FLAGS, "--enable-prompt-embeds", "--trust-request-chat-template")
    with serving(tmp_path, *flags, stepped=True) as server:
        bodies: dict[str, Any] = {
            "tokens": {"prompt": [ids]},
            "embeds": {"prompt_embeds": encoded(table[ids])},
            "other": {"prompt_embeds": as_safetensors(table[ids] + 0.5)},
            "parts": {"messages": chat((encoded(table[ids[:50]]),), text)["messages"], "chat_template": template},
        }
        undisturbed = {name: tokens(server, **body) for name, body in bodies.items()}
        assert undisturbed["parts"] == undisturbed["embeds"] == undisturbed["tokens"] != undisturbed["other"]
        found: dict[str, Any] = {}

        def ask(name: str) -> None:
            found[name] = tokens(server, **bodies[name])

        asking = [threading.Thread(target=ask, args=(name,)) for name in bodies]
        server.wait_idle()
        server.steps.hold_after(50)
        for thread in asking:
            thread.start()
        while server.load()["running"] < len(bodies):
            assert not found, "a request ended before all of them ran"
        server.kill_engine()
        server.steps.release()
        for thread in asking:
            thread.join()
        assert found == undisturbed
        aborted: list[Any] = []
        body = {**common, **bodies["other"], "request_id": "mine"}
        server.wait_idle()
        server.steps.hold_after(50)
        last = threading.Thread(target=lambda: aborted.append(server.post("/v1/completions", body)))
        last.start()
        while not server.load()["running"]:
            assert not aborted
        assert server.post("/abort_requests", {"request_ids": ["cmpl-mine"]})[0] == 200
        server.steps.release()
        last.join()
        assert {choice["finish_reason"] for choice in aborted[0][1]["choices"]} == {"abort"}
        server.wait_idle()
        pooled = [server.post("/v1/embeddings", body) for body in ({"input": ids}, bodies["parts"])]
        assert [status for status, _ in pooled] == [200, 200], pooled
        assert pooled[0][1]["data"] == pooled[1][1]["data"]
