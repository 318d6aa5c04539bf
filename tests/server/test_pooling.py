"""The routes that pool prompts, over a real socket, on the fake executor."""

import base64
import json
import struct
import threading
from typing import Any

import pytest

from tests.server.live import LiveServer

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
