"""/v1/files and /v1/batches with OpenAI's own client."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.server.live import LiveServer

URL = "/v1/completions"


def line_of(number: int, url: str = URL, **body: Any) -> str:
    body = body or {"prompt": f"Line {number}", "max_tokens": 5, "seed": number}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body})


def client_of(server: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, lines: Sequence[str | bytes], purpose: Any = "batch") -> str:
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    return client.files.create(file=("in.jsonl", data), purpose=purpose).id


def create(client: openai.OpenAI, lines: Sequence[str | bytes], url: Any = URL, **other: Any) -> Batch:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file, endpoint=url, completion_window="24h", **other)


def ended(client: openai.OpenAI, batch: Batch, timeout_s: float = 60.0) -> Batch:
    end_s = time.monotonic() + timeout_s
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end_s, f"the batch does not end: {batch}"
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def answers(client: openai.OpenAI, file: str | None) -> Iterator[Any]:
    assert file is not None
    return map(json.loads, client.files.content(file).text.splitlines())


def test_a_file_is_kept_listed_and_deleted(fake_server: LiveServer) -> None:
    client = client_of(fake_server)
    content = bytes(range(256)) * 20_000  # beyond what a form keeps in memory
    made = client.files.create(
        file=("../a folder/words.bin", content),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(content),
        "words.bin",
        "user_data",
        "processed",
    )
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    others = [upload(client, ["x"], "assistants") for _ in range(4)]
    assert [one.id for one in client.files.list(purpose="user_data")] == [made.id]
    assert [one.id for one in client.files.list(purpose="assistants", limit=2)] == others[::-1]  # two pages
    assert [one.id for one in client.files.list(purpose="assistants", limit=3, order="asc")] == others
    for id in (made.id, *others):
        assert client.files.delete(id).deleted
    with pytest.raises(openai.NotFoundError, match="this key has no file"):
        client.files.content(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(made.id)


def test_a_batch_is_answered(fake_server: LiveServer) -> None:
    client = client_of(fake_server)
    lines = [line_of(number) for number in range(30)]
    lines[7] = line_of(7, prompt="x", model="none")
    batch = create(client, lines, metadata={"night": "1"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", URL, {"night": "1"})
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (30, 29, 1)
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    assert batch.in_progress_at <= batch.completed_at
    done = {one["custom_id"]: one["response"] for one in answers(client, batch.output_file_id)}
    assert done.keys() == {f"id-{number}" for number in range(30) if number != 7}
    usages = [one["body"]["usage"] for one in done.values()]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(one["total_tokens"] for one in usages)
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in usages)
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in usages) > 0
    assert (batch.usage.output_tokens_details.reasoning_tokens, batch.model) == (0, "smollm2-135m")
    for number in (0, 29):
        expected = client.completions.create(model="smollm2-135m", **json.loads(lines[number])["body"])
        assert done[f"id-{number}"]["body"]["choices"] == [one.to_dict() for one in expected.choices]
    (failed,) = answers(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-7", 404)
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"
    assert client.batches.list(limit=1).data[0] == batch


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_each_endpoint(fake_server: LiveServer, url: str, body: Any) -> None:
    client = client_of(fake_server)
    batch = ended(client, create(client, [line_of(1, url, **body)], url))
    assert batch.error_file_id is None
    (answer,) = answers(client, batch.output_file_id)
    assert answer["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("lines", "code", "number", "message"),
    [
        ([line_of(1), "{no"], "invalid_json_line", 2, "cannot be read as a JSON object"),
        ([line_of(1), line_of(2)[:-9]], "invalid_json_line", 2, "truncated"),
        ([line_of(1), line_of(2), line_of(1)], "duplicate_custom_id", 3, "line 1 has the custom_id 'id-1', too"),
        ([line_of(1, "/v1/embeddings", input="x")], "invalid_url", 1, "the endpoint of the batch"),
        ([b"\xff\xfe"], "invalid_json_line", 1, "cannot be read"),
        ([""], "empty_file", None, "no line"),
    ],
)
def test_an_input_that_is_wrong_fails_before_it_runs(
    fake_server: LiveServer, lines: list[str | bytes], code: str, number: int | None, message: str
) -> None:
    client = client_of(fake_server)
    batch = ended(client, create(client, lines))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, number)
    assert message in (error.message or "")


def test_files_and_batches_belong_to_their_key(keyed_server: LiveServer) -> None:
    one, two = client_of(keyed_server, "one"), client_of(keyed_server, "two")
    batch = ended(one, create(one, [line_of(1)]))
    assert batch.status == "completed"
    file = batch.output_file_id
    assert file is not None
    assert len(list(answers(one, file))) == 1
    assert list(two.files.list()) == []
    assert list(two.batches.list()) == []
    for call in (
        lambda: two.files.retrieve(file),
        lambda: two.files.content(file),
        lambda: two.files.delete(file),
        lambda: two.batches.retrieve(batch.id),
        lambda: two.batches.cancel(batch.id),
        lambda: two.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert one.batches.retrieve(batch.id) == batch


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-none", "endpoint": URL}, "input_file_id"),
        ({"input_file_id": "file-none", "endpoint": "/v1/models"}, "endpoint"),
        ({"input_file_id": "file-none", "endpoint": URL, "completion_window": "31d"}, "completion_window"),
        ({"endpoint": URL}, "input_file_id"),
        (
            {"input_file_id": "x", "endpoint": URL, "output_expires_after": {"seconds": 1}},
            "output_expires_after.seconds",
        ),
    ],
)
def test_what_is_asked_wrongly_names_the_field(fake_server: LiveServer, body: Any, param: str) -> None:
    status, answer = fake_server.post("/v1/batches", body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param


def test_only_files_for_batches_are_run(fake_server: LiveServer) -> None:
    client = client_of(fake_server)
    file = upload(client, [line_of(1)], "assistants")
    with pytest.raises(openai.BadRequestError, match="upload it with the purpose batch"):
        client.batches.create(input_file_id=file, endpoint=URL, completion_window="24h")
