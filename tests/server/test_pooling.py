"""The routes that pool prompts, over a real socket, on the fake executor."""

import base64
import json
import signal
import struct
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body_reader import parse_body
from pagoda.server.embeddings import EmbeddingRequest, _written
from tests.server.live import FAKE_FLAGS, LiveServer, serving

TEXTS = ["The sky is blue.", "Bread", "The sky"]


def vectors(server: LiveServer, **body: Any) -> list[list[float]]:
    status, answer = server.post("/v1/embeddings", {"input": TEXTS, **body})
    assert status == 200, answer
    assert answer["object"] == "list"
    assert answer["id"].startswith("embd-")
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
        ("embedding", 2),
    ]
    return [item["embedding"] for item in answer["data"]]


def test_embeddings_as_numbers_as_bytes_and_of_token_ids(fake_server: LiveServer) -> None:
    plain = vectors(fake_server)
    for packed, vector in zip(vectors(fake_server, encoding_format="base64"), plain, strict=True):
        assert list(struct.unpack(f"<{len(vector)}f", base64.b64decode(packed))) == vector  # type: ignore[arg-type]
    ids = [fake_server.post("/tokenize", {"prompt": text})[1]["tokens"] for text in TEXTS]
    assert vectors(fake_server, input=ids) == plain
    one = fake_server.post("/v1/embeddings", {"input": ids[1]})[1]
    assert [item["embedding"] for item in one["data"]] == plain[1:2]
    assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] == len(ids[1])
    assert one["model"] == "smollm2-135m"
    assert [len(vector) for vector in vectors(fake_server, dimensions=5)] == [5, 5, 5]
    cut = fake_server.post("/v1/embeddings", {"input": TEXTS[0], "truncate_prompt_tokens": 2})[1]
    assert cut["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(("order", "mark"), [("big", ">"), ("little", "<"), ("native", "<")])
def test_bytes_are_of_the_type_and_order_that_a_client_asks_for(
    fake_server: LiveServer, path: str, order: str, mark: str
) -> None:
    plain = vectors(fake_server)[0]
    name = "embedding" if path == "/v1/embeddings" else "data"
    for kind, size in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        body = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": kind, "endianness": order}
        data = base64.b64decode(fake_server.post(path, body)[1]["data"][0][name])
        if kind == "bfloat16":
            given = (np.frombuffer(data, f"{mark}u2").astype(np.uint32) << 16).view(np.float32)
        else:
            given = np.frombuffer(data, f"{mark}f{size}").astype(np.float32)
        assert np.allclose(given, plain, rtol=0 if kind == "float32" else 2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ({"endianness": "middle"}, "endianness"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"output_dtype": "int8"}, "output_dtype"),
        ({"embedding_types": ["ubinary"]}, "embedding_types"),
    ],
)
def test_a_form_that_is_not_served_is_refused(fake_server: LiveServer, more: dict[str, Any], param: str) -> None:
    """Ignoring it would have the client decode noise."""
    status, answer = fake_server.post("/v1/embeddings", {"input": "a", **more})
    assert (status, answer["error"]["param"]) == (400, param)


def test_a_number_that_float16_cannot_hold_is_refused() -> None:
    """Else it would be an infinity, with status 200."""
    body = {"input": "a", "encoding_format": "base64", "embed_dtype": "float16"}
    write = _written(parse_body(json.dumps(body).encode(), EmbeddingRequest, RequestLimits()))
    largest = base64.b64decode(write(np.array([-65_504, 65_519], np.float32)))
    assert np.frombuffer(largest, "<f2").tolist() == [-65_504, 65_504]
    with pytest.raises(RequestError, match="one of this answer is 70000: ask for bfloat16 or float32") as got:
        write(np.array([1, -70_000], np.float32))
    assert got.value.param == "embed_dtype"


def test_a_model_that_was_not_trained_for_scores_says_so(fake_server: LiveServer) -> None:
    request = urllib.request.Request(
        f"{fake_server.url}/rerank",
        json.dumps({"query": "a", "documents": ["b"]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert "nothing says that it was trained for embeddings or scores" in answer.headers["X-Warning"]
    assert fake_server.log.read_text().count("nothing says that it was trained") == 1


def test_an_embedding_without_activation_is_not_normalised() -> None:
    params = parse_body(b'{"input": "x", "use_activation": false}', EmbeddingRequest, RequestLimits()).pooling_params()
    assert (params.task, params.use_activation) == ("embed", False)  # the pooler: the same as normalize=False


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_conversation_is_one_input(fake_server: LiveServer, path: str) -> None:
    messages = [{"role": "user", "content": "The sky <|im_end|>"}, {"role": "assistant", "content": "is blue."}]
    for extra in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        rendered = {"messages": messages, "add_generation_prompt": False, **extra}
        ids = fake_server.post("/tokenize", rendered)[1]["tokens"]
        status, answer = fake_server.post(path, {"messages": messages, **extra})
        assert status == 200, answer
        assert answer["data"] == fake_server.post(path, {"input": ids})[1]["data"]
        assert answer["usage"]["prompt_tokens"] == len(ids)
    own = fake_server.post(path, {"messages": messages, "chat_template": "{{ messages[1].content }}"})[1]
    ids = fake_server.post("/tokenize", {"prompt": "is blue.", "add_special_tokens": False})[1]["tokens"]
    assert own["data"] == fake_server.post(path, {"input": ids})[1]["data"]
    cut = fake_server.post(path, {"messages": messages, "truncate_prompt_tokens": 3})[1]
    assert cut["usage"]["prompt_tokens"] == 3
    for body, param in (
        ({}, "input"),
        ({"input": "x", "messages": messages}, "input"),
        ({"input": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ):
        status, answer = fake_server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
    if path == "/v1/embeddings":
        status, answer = fake_server.post(path, {"messages": messages, "prompt_name": "query"})
        assert (status, answer["error"]["param"]) == (400, "prompt_name")
    else:
        status, answer = fake_server.post(path, {"input": "x", "task": "token_classify"})
        assert status == 400
        assert "does not support token_classify; it supports generate, embed" in answer["error"]["message"]


def test_metrics_count_prompts_that_are_pooled(fake_server: LiveServer) -> None:
    def counted(name: str) -> float:
        lines = fake_server.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    names = ("prompt_tokens_total", "request_success_total", "request_prefill_time_seconds_count")
    before = {name: counted(name) for name in names}
    num_tokens = fake_server.post("/v1/embeddings", {"input": TEXTS})[1]["usage"]["prompt_tokens"]
    assert [counted(name) - before[name] for name in names] == [num_tokens, 3, 3]


def test_pooling_is_the_same_by_its_own_route(fake_server: LiveServer) -> None:
    status, answer = fake_server.post("/pooling", {"input": TEXTS, "task": "embed"})
    assert status == 200
    assert [item["data"] for item in answer["data"]] == vectors(fake_server)
    assert {item["object"] for item in answer["data"]} == {"pooling"}


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(fake_server: LiveServer, path: str) -> None:
    first, *others = vectors(fake_server)
    status, answer = fake_server.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    assert status == 200
    cosines = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    assert [item["score"] for item in answer["data"]] == pytest.approx(cosines, abs=1e-6)
    same = {"queries": TEXTS[:2], "documents": TEXTS[:2]}
    assert [item["score"] for item in fake_server.post(path, same)[1]["data"]] == pytest.approx([1, 1], abs=1e-6)
    items = {"queries": TEXTS[0], "items": TEXTS[1:]}
    assert fake_server.post(path, items)[1]["data"] == answer["data"]
    assert fake_server.post(path, {**items, "documents": ["a"]})[1]["error"]["param"] == "text_1"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_scores(fake_server: LiveServer, path: str) -> None:
    documents = ["Bread", {"text": "The sky"}, TEXTS[0], "Bread"]
    status, answer = fake_server.post(path, {"query": TEXTS[0], "documents": documents})
    assert status == 200
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 2
    assert answer["results"][0]["document"] == {"text": TEXTS[0]}
    order = [result["index"] for result in answer["results"]]
    assert order.index(0) + 1 == order.index(3)  # equal documents stay in their order
    best = fake_server.post(path, {"query": TEXTS[0], "documents": documents, "top_n": 2, "return_documents": False})[1]
    assert [result["index"] for result in best["results"]] == order[:2]
    assert "document" not in best["results"][0]


def test_documents_are_cut_where_a_client_asks_for_it(fake_server: LiveServer) -> None:
    query, documents = TEXTS[0], [f"{TEXTS[0]} and more and more", TEXTS[0], "日本語"]
    count = fake_server.post("/tokenize", {"prompt": query})[1]["count"]
    body = {"query": query, "documents": documents, "max_tokens_per_doc": count}
    whole, cut = (fake_server.post("/rerank", one)[1] for one in ({**body, "max_tokens_per_doc": 0}, body))
    by_index = {one["index"]: one for one in cut["results"]}
    assert by_index[0]["relevance_score"] == pytest.approx(by_index[1]["relevance_score"]) == pytest.approx(1)
    assert by_index[0]["document"]["text"] == documents[0]
    assert cut["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    assert fake_server.post("/rerank", {**body, "max_tokens_per_doc": 1})[0] == 200


def test_many_texts_beside_a_generated_one(fake_server: LiveServer) -> None:
    said: list[Any] = []
    generated = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    asking = threading.Thread(target=lambda: said.append(fake_server.post("/v1/completions", generated)))
    asking.start()
    texts = [f"text number {number}" for number in range(300)]
    status, answer = fake_server.post("/v1/embeddings", {"input": texts})
    asking.join()
    assert status == 200
    assert said[0][0] == 200
    assert len({json.dumps(item["embedding"]) for item in answer["data"]}) == 300
    assert (
        fake_server.post("/v1/embeddings", {"input": texts[7]})[1]["data"][0]["embedding"]
        == (answer["data"][7]["embedding"])
    )
    fake_server.wait_idle()
    status, answer = fake_server.post("/v1/embeddings", {"input": ["a"] * 2049})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "2049 texts" in answer["error"]["message"]


def test_a_kill_an_abort_and_the_end_with_hundreds_in_flight(tmp_path: Path) -> None:
    """One request of 360 texts and 40 of one. Their vectors are those of an undisturbed engine; nothing is left over.

    A step has two prompts, and the engine is held after some. The gauge `running` is 0: a step ends its prompts.
    """
    texts = [f"text number {number}" for number in range(400)]
    inputs = [texts[:360], *([text] for text in texts[360:])]
    flags = (*FAKE_FLAGS, "--max-num-seqs", "2")

    with (
        serving(tmp_path, *flags, stepped=True) as server,
        ThreadPoolExecutor(len(inputs)) as clients,
    ):

        def ask(name: str, count: int = len(inputs)) -> list[Future[tuple[int, Any]]]:
            bodies = [{"input": given, "request_id": f"{name}-{i}"} for i, given in enumerate(inputs[:count])]
            return [clients.submit(server.post, "/v1/embeddings", body) for body in bodies]

        def found(asked: list[Future[tuple[int, Any]]]) -> list[list[list[float]]]:
            answers = [one.result() for one in asked]
            assert {status for status, _ in answers} == {200}
            return [[item["embedding"] for item in answer["data"]] for _, answer in answers]

        def wait_until_busy(num_prompts: int = 400) -> None:
            """All prompts have been received, and the engine was held after it reported that most wait."""
            server.wait_load(num_prompts, 60)
            server.steps.hold_after(30)
            end = time.monotonic() + 60
            while (load := server.load())["server_load"] < 360 or load["waiting"] < 100:
                assert time.monotonic() < end, f"the prompts were never seen waiting: {load}"

        undisturbed = found(ask("plain"))
        server.wait_idle()
        server.steps.hold_after(0)
        asked = ask("killed")
        wait_until_busy()
        server.kill_engine()
        server.steps.release()
        assert found(asked) == undisturbed
        assert server.wait_idle()["engine_restarts"] == 1

        server.steps.hold_after(0)
        asked = ask("aborted")
        wait_until_busy()
        long = "embd-aborted-0"
        assert server.post("/abort_requests", {"request_ids": [long]})[1] == {"aborted": [long]}
        server.steps.release()
        status, answer = asked[0].result()
        assert (status, answer["error"]["message"]) == (400, "the request ended without a result (abort)")
        assert found(asked[1:]) == undisturbed[1:]
        assert server.wait_idle()["live_tokens"] == 0

        server.steps.hold_after(0)
        asked = ask("last", 1)
        wait_until_busy(360)
        server.kill_engine()
        server.steps.release()
        server.process.send_signal(signal.SIGTERM)  # drains, although an engine has to be started for it
        assert found(asked) == undisturbed[:1]
        assert server.process.wait(20) == 0
