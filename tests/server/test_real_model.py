"""The server over SmolLM2: log-probabilities against transformers, and kills under load with real numbers."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.cached_models import cached_model, transformers_model
from tests.server.live import LiveServer
from tests.server.test_replay import Ask, ask_all

PROMPT = "The lighthouse keeper wrote one letter a month to his sister, who lived inland and"
TOP = 5


@pytest.fixture(scope="module")
def reference() -> object:
    """token ids -> log-probabilities float32 [len, vocab] of the token after each."""
    model = transformers_model(cached_model("smollm2-135m"))

    @torch.inference_mode()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)

    return logprobs


def test_logprobs_are_those_of_transformers(real_server: LiveServer, reference: object) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": TOP, "prompt_logprobs": 2}
    answer = real_server.post("/v1/completions", {**body, "return_token_ids": True})[1]["choices"][0]
    prompt_ids, ids = answer["prompt_token_ids"], answer["token_ids"]
    expected = reference(prompt_ids + ids)  # type: ignore[operator]
    logprobs = answer["logprobs"]
    for i, token in enumerate(ids):
        row = expected[len(prompt_ids) + i - 1]
        assert logprobs["token_logprobs"][i] == pytest.approx(float(row[token]), abs=2e-3)
        best = torch.topk(row, TOP).values.tolist()
        assert sorted(logprobs["top_logprobs"][i].values(), reverse=True) == pytest.approx(best, abs=2e-3)
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert answer["prompt_logprobs"][0] is None
    for i, token in enumerate(prompt_ids[1:], start=1):
        given = answer["prompt_logprobs"][i][str(token)]
        row = expected[i - 1]
        assert given["logprob"] == pytest.approx(float(row[token]), abs=2e-3)
        assert abs(given["rank"] - int((row > row[token]).sum()) - 1) <= 1


def test_tokens_can_be_written_as_ids(real_server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    text = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = real_server.post("/v1/chat/completions", {**chat, "top_logprobs": 2, **more})[1]["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
    plain = real_server.post("/v1/completions", text)[1]["choices"][0]
    choice = real_server.post("/v1/completions", {**text, **more})[1]["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] if top for name in top)
    assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert choice["text"] == plain["text"]


def test_minus_one_asks_for_as_many_logprobs_as_the_server_allows(real_server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    status, answer = real_server.post("/v1/chat/completions", {**chat, "top_logprobs": -1, "prompt_logprobs": -1})
    assert status == 200, answer
    assert [len(entry["top_logprobs"]) for entry in answer["choices"][0]["logprobs"]["content"]] == [20] * 4
    assert {len(entry) for entry in answer["prompt_logprobs"][1:]} <= {20, 21}  # with the prompt's own token


def test_chosen_tokens_are_reported_in_place_of_the_most_likely(real_server: LiveServer) -> None:
    ids = [260, 17]
    more = {"max_tokens": 3, "temperature": 0, "logprob_token_ids": [*ids, ids[0]], "return_tokens_as_token_ids": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], **more}
    status, answer = real_server.post("/v1/chat/completions", {**chat, "logprobs": True})
    assert status == 200, answer
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [
        [f"token_id:{i}" for i in ids]
    ] * 3
    answer = real_server.post("/v1/completions", {"prompt": PROMPT, **more})[1]
    for own, top in zip(*(answer["choices"][0]["logprobs"][name] for name in ("tokens", "top_logprobs")), strict=True):
        assert {*top} == {own, *(f"token_id:{i}" for i in ids)}
    echoed = {"prompt": PROMPT, "echo": True, "logprobs": 1, **more}  # the prompt's would be of other tokens
    for path, refused in (("/v1/chat/completions", chat), ("/v1/completions", echoed)):
        status, answer = real_server.post(path, refused)
        assert (status, answer["error"]["param"]) == (400, "logprob_token_ids")


def test_chat_logprobs_and_echo(real_server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    answer = real_server.post("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 3})[1]["choices"][0]
    assert len(answer["logprobs"]["content"]) == 4
    for entry in answer["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = real_server.post("/v1/completions", body)[1]["choices"][0]
    assert scored["text"] == PROMPT
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in scored["logprobs"]["token_logprobs"][1:])
    full = [1000 + place for place in range(2048)]  # as many as the model's context has here
    scored = real_server.post("/v1/completions", {**body, "prompt": full})[1]["choices"][0]
    shorter = real_server.post("/v1/completions", {**body, "prompt": full[:500]})[1]["choices"][0]
    assert scored["logprobs"]["token_logprobs"][:500] == shorter["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["token_logprobs"][-1] < 0


def asks_with_numbers() -> list[Ask]:
    """Seeded sampling of every kind, with log-probabilities; ends by length, stop strings, and the model's own."""
    text: dict[str, object] = {"prompt": PROMPT, "max_tokens": 40, "return_token_ids": True}
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 40}
    late_stop = {"stop": [" the", " a"], "include_stop_str_in_output": True, "min_tokens": 20}
    penalties = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    bodies = [
        {**text, "seed": 1, "temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2},
        {**text, "seed": 2, "n": 2, "top_p": 0.9, "logprobs": 2, "stop": ["."], "min_tokens": 15},
        {**text, "seed": 3, "n": 2, "logprobs": 0, **late_stop, **penalties},
        {**text, "seed": 4, "n": 2, "top_k": 20, "echo": True, "logprobs": 1},
        {**text, "temperature": 0, "logprobs": 5, "bad_words": [" he"]},
        {**text, "seed": 5, "n": 2, "logprobs": 1, "stop": [","], "stream": False},
        {**chat, "seed": 6, "logprobs": True, "top_logprobs": 3, "min_tokens": 39},
        {**chat, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 1, "logit_bias": {"30": 5.0}, "stop": ["\n\n"]},
    ]
    return [("/v1/chat/completions" if "messages" in body else "/v1/completions", body) for body in bodies]


@pytest.mark.slow
def test_a_kill_changes_no_logprob(real_server: LiveServer) -> None:
    asks = asks_with_numbers()
    undisturbed = asyncio.run(ask_all(real_server, asks))
    assert all(whole["status"] == 200 for whole in undisturbed)
    assert len(undisturbed[0][0]["logprobs"]) == len(undisturbed[6][0]["logprobs"]) == 40
    num_restarts = real_server.load()["engine_restarts"]
    assert asyncio.run(ask_all(real_server, asks, kill_after=(60,))) == undisturbed
    assert real_server.wait_idle()["engine_restarts"] == num_restarts + 1


def test_a_kill_changes_no_embedding(real_server: LiveServer) -> None:
    body = {"input": [f"Letter {number} of the lighthouse keeper" for number in range(32)]}
    undisturbed = real_server.post("/v1/embeddings", body)[1]["data"]
    num_restarts = real_server.wait_idle()["engine_restarts"]
    with ThreadPoolExecutor(1) as clients, real_server.steps.held_after(0):
        asked = clients.submit(real_server.post, "/v1/embeddings", body)
        real_server.wait_load(32)
        real_server.kill_engine()
        real_server.steps.release()
        status, answer = asked.result()
    assert status == 200
    assert answer["data"] == undisturbed
    assert real_server.wait_idle()["engine_restarts"] == num_restarts + 1
