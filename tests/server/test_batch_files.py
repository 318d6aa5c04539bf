"""Batch files without an engine: hostile lines, the output file as a journal, and how much is in flight."""

import asyncio
import itertools
import json
import resource
import tracemalloc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.server.app import ENDPOINTS
from pagoda.server.batches.lines import PATHS, Answer, InputLine, Journal, OutputLine, read_lines
from pagoda.server.batches.offline import Survey, survey
from pagoda.server.batches.run import AppCaller, answer_lines
from pagoda.server.batches.worker import check_input

MAX_BYTES = 1000
CHAT = "/v1/chat/completions"


def line_of(custom_id: object, **other: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"n": 1}, **other})


def write_input(folder: Path, *lines: str | bytes, name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines))
    return path


def app_of(answer: Any) -> ASGIApp:
    """An app whose routes answer with what `await answer(number, body)` returns: a status, a type and a body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        number = int(dict(scope["headers"])[b"x-request-id"].rpartition(b"_")[2])
        status, kind, body = await answer(number, (await receive())["body"])
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body[:1], "more_body": True})
        await send({"type": "http.response.body", "body": body[1:]})

    return app


async def echo(number: int, body: bytes) -> tuple[int, bytes, bytes]:
    await asyncio.sleep(0)
    return 200, b"application/json", body


def at_most(count: Callable[[], int]) -> Callable[[InputLine, Collection[InputLine]], bool]:
    return lambda _, running: len(running) < count()


def run(path: Path, target: Path, answer: Any = echo, max_in_flight: int = 4, died: Exception | None = None) -> Journal:
    def raise_if_dead() -> None:
        if died is not None:
            raise died

    with Journal(target) as journal:
        lines = (line for line in read_lines(path, MAX_BYTES) if not journal.has(line))
        caller = AppCaller(app_of(answer), raise_if_dead)
        asyncio.run(answer_lines(caller, lines, journal, at_most(lambda: max_in_flight), lambda: None))
        return journal


def answers(target: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    return sorted(lines, key=lambda line: int(line["id"].removeprefix("batch_req_")))


def test_all_routes_of_lines_are_served() -> None:
    assert set(PATHS) <= {endpoint.path for endpoint in ENDPOINTS}


@pytest.mark.parametrize(
    ("line", "code", "custom_id", "words"),
    [
        ("not JSON", "invalid_json_line", None, "cannot be read as a JSON object"),
        ("5", "invalid_json_line", None, "got `int`"),
        (b"\xff\xfe\n", "invalid_json_line", None, "cannot be read"),
        ("[" * 100_000, "line_too_long", None, f"longer than {MAX_BYTES} bytes"),
        ('{"custom_id": "\\ud800 without its other half"}', "invalid_json_line", None, "surrogate"),
        ("{}", "missing_required_parameter", None, "custom_id is missing"),
        (line_of(5), "invalid_custom_id", None, "(got 5)"),
        (line_of(""), "invalid_custom_id", None, "(got '')"),
        (line_of("x", method="GET"), "invalid_method", "x", "must be POST (got 'GET')"),
        (line_of("x", method=None), "invalid_method", "x", "(got None)"),
        (line_of("x", url="/v1/files"), "invalid_url", "x", "(got '/v1/files')"),
        (line_of("x", url=f"http{CHAT}"), "invalid_url", "x", "must be one of /v1/chat/completions, "),
        ('{"custom_id": "x", "method": "POST", "url": "/score"}', "missing_required_parameter", "x", "body is missing"),
        (line_of("x", body={"stream": True}), "invalid_stream", "x", "stream must be false"),
        (line_of("x", body={"background": True}), "invalid_background", "x", "background must be false"),
        (line_of("first"), "duplicate_custom_id", "first", "line 1 has the custom_id 'first', too"),
    ],
)
def test_a_line_that_cannot_be_sent_is_an_error_line(
    tmp_path: Path, line: str | bytes, code: str, custom_id: str | None, words: str
) -> None:
    path = write_input(tmp_path, line_of("first"), line, line_of("last"))
    journal = run(path, tmp_path / "out")
    first, bad, last = answers(tmp_path / "out")
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (custom_id, None, code)
    assert words in bad["error"]["message"]
    assert len(bad["error"]["message"]) < 400
    assert [line["custom_id"] for line in (first, last)] == ["first", "last"]
    assert (journal.num_done, journal.num_failed) == (3, 1)
    assert journal.first_failure == f"line 2: {bad['error']['message']}"


def test_bodies_are_sent_as_they_are_written(tmp_path: Path) -> None:
    """Also after a mark of UTF-8, blank lines, with ends of lines of Windows, and without an end of the last one."""
    odd = '{"body": { "a" : 1e2,  "b":"\\u00e9" } , "custom_id":"x","method":"POST","url":"http://host:1/v1/score/"}'
    path = write_input(tmp_path, b"\xef\xbb\xbf" + odd.encode() + b"\r\n", b"\r\n", "", line_of("last").encode())
    seen: dict[int, bytes] = {}

    async def answer(number: int, body: bytes) -> tuple[int, bytes, bytes]:
        seen[number] = body
        return await echo(number, b"{}")

    run(path, tmp_path / "out", answer)
    assert seen == {1: b'{ "a" : 1e2,  "b":"\\u00e9" }', 4: b'{"n": 1}'}


def test_a_run_goes_on_from_any_byte_of_the_output(tmp_path: Path) -> None:
    """Whenever a run is killed, the output is a beginning of the whole."""
    lines = [line_of("a"), "not JSON", line_of("b"), line_of("a"), line_of("c", url="/no")]
    path = write_input(tmp_path, *lines)
    run(path, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    target = tmp_path / "out"
    for size in range(len(whole) + 1):
        target.write_bytes(whole[:size])
        asked: list[int] = []

        async def answer(number: int, body: bytes, asked: list[int] = asked) -> tuple[int, bytes, bytes]:
            asked.append(number)
            return await echo(number, body)

        kept = [json.loads(one) for one in whole[:size].split(b"\n")[:-1]]
        journal = run(path, target, answer)
        assert answers(target) == answers(tmp_path / "whole")
        assert {int(line["id"].removeprefix("batch_req_")) for line in kept}.isdisjoint(asked)
        assert (journal.num_done, journal.num_failed) == (5, 3)


@pytest.mark.parametrize(
    "content", [b"precious", b"precious\n", b"{}\n", b'{"id":"x"', b"\n", b'{"id":"batch_req_1"}\n']
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(ConfigError, match="line 1 is no answer of run-batch: give another output file"):
        Journal(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


def test_the_output_of_another_input_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    run(write_input(tmp_path, line_of("a"), line_of("b")), target)
    before = target.read_bytes()
    with Journal(target) as journal:
        assert survey(tmp_path / "in.jsonl", journal) == Survey(2, None)
        with pytest.raises(ConfigError, match="has an answer to line 1 of another input"):
            survey(write_input(tmp_path, line_of("x"), line_of("b"), name="other"), journal)
        with pytest.raises(ConfigError, match="has 2 answers, 1 of them to lines that .* does not have"):
            survey(write_input(tmp_path, line_of("a"), name="short"), journal)
        with pytest.raises(ConfigError, match="another run writes"):
            Journal(target)
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            survey(tmp_path / "none", journal)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        Journal(tmp_path)
    assert target.read_bytes() == before


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    """What did not fit is cut when the run goes on."""
    path = write_input(tmp_path, *(line_of(f"{number}") for number in range(10)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(ConfigError, match="out cannot be written: File too large; give another output file"):
            run(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").read_bytes().endswith(b"\n")
    assert run(path, tmp_path / "out").num_done == 10
    assert len(answers(tmp_path / "out")) == 10


def test_devices_are_no_output_files() -> None:
    with pytest.raises(ConfigError, match="/dev/null is a device or a pipe"):
        Journal(Path("/dev/null"))


def test_lines_in_flight_are_limited(tmp_path: Path) -> None:
    """And none is read before there is room for it, so that memory does not grow with the file."""
    num_lines, limit = 10_000, 16
    path = write_input(tmp_path, *(line_of(f"id-{number}") for number in range(num_lines)))
    num_read = num_running = most_running = most_ahead = 0

    async def answer(number: int, body: bytes) -> tuple[int, bytes, bytes]:
        nonlocal num_running, most_running
        num_running += 1
        most_running = max(most_running, num_running)
        for _ in range(number % 5):  # answers overtake each other
            await asyncio.sleep(0)
        num_running -= 1
        return 200, b"application/json", body

    with Journal(tmp_path / "out") as journal:

        def lines() -> Iterator[InputLine]:
            nonlocal num_read, most_ahead
            for line in read_lines(path, MAX_BYTES):
                num_read += 1
                most_ahead = max(most_ahead, num_read - journal.num_done)
                yield line

        asyncio.run(
            answer_lines(
                AppCaller(app_of(answer), lambda: None), lines(), journal, at_most(lambda: limit), lambda: None
            )
        )
    assert most_running <= limit
    assert most_ahead == limit + 1
    assert [line["custom_id"] for line in answers(tmp_path / "out")] == [f"id-{number}" for number in range(num_lines)]


def test_bytes_in_flight_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.server.batches.run._MAX_IN_FLIGHT_BYTES", 1500)
    path = write_input(tmp_path, *(line_of(f"{number}", body={"x": "y" * 700}) for number in range(20)))
    num_running = most_running = num_begun = 0

    async def answer(number: int, body: bytes) -> tuple[int, bytes, bytes]:
        nonlocal num_running, most_running, num_begun
        num_running += 1
        num_begun += 1
        most_running = max(most_running, num_running)
        while num_running < 3 and num_begun < 18:
            await asyncio.sleep(0)
        num_running -= 1
        return 200, b"application/json", b"{}"

    run(path, tmp_path / "out", answer, max_in_flight=16)
    assert most_running == 3
    assert len(answers(tmp_path / "out")) == 20


def test_a_full_server_is_not_asked_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused waits for the end of another line, however many wait."""
    monkeypatch.setattr("pagoda.server.batches.run._RETRY_S", 1e6)
    path = write_input(tmp_path, *(line_of(f"{number}") for number in range(500)))
    num_running = num_calls = 0

    async def answer(number: int, body: bytes) -> tuple[int, bytes, bytes]:
        nonlocal num_running, num_calls
        num_calls += 1
        if num_running == 3:
            await asyncio.sleep(0)  # those that run may end before the refusal is seen
            return 429, b"application/json", b"{}"
        num_running += 1
        for _ in range(number % 7):
            await asyncio.sleep(0)
        num_running -= 1
        return 200, b"application/json", b"{}"

    assert run(path, tmp_path / "out", answer, max_in_flight=64).num_failed == 0
    assert len(answers(tmp_path / "out")) == 500
    assert num_calls < 500 * 4


def test_what_the_routes_answer_is_in_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that finds the server full is sent again; answers that are no JSON are errors."""
    monkeypatch.setattr("pagoda.server.batches.run._RETRY_S", 0)
    path = write_input(tmp_path, *(line_of(f"id-{number}") for number in range(1, 5)))
    num_full = 3

    async def answer(number: int, body: bytes) -> tuple[int, bytes, bytes]:
        nonlocal num_full
        if number == 1 and num_full:
            num_full -= 1
            return 429, b"application/json", b"{}"
        other = {
            2: (400, b"application/json", b'{"error":{"message":"no such model"}}'),
            3: (200, b"application/octet-stream", b"\0\n"),
            4: (503, b"application/json", b"{}"),  # of an engine that lives
        }
        return other.get(number) or await echo(number, body)

    journal = run(path, tmp_path / "out", answer)
    ok, refused, odd, unavailable = answers(tmp_path / "out")
    assert ok == {
        "id": "batch_req_1",
        "custom_id": "id-1",
        "response": {"status_code": 200, "request_id": "batch_req_1", "body": {"n": 1}},
        "error": None,
    }
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"] == {"error": {"message": "no such model"}}
    assert (odd["response"], odd["error"]["code"]) == (None, "unsupported_answer")
    assert unavailable["response"]["status_code"] == 503
    assert (journal.num_failed, num_full) == (3, 0)


def test_what_a_dead_engine_leaves_is_for_the_next_run(tmp_path: Path) -> None:
    path = write_input(tmp_path, *(line_of(f"{number}") for number in range(10)))

    async def answer(number: int, body: bytes) -> tuple[int, bytes, bytes]:
        return await echo(number, body) if number < 4 else (503, b"application/json", b"{}")

    with pytest.raises(WorkerDied):
        run(path, tmp_path / "out", answer, max_in_flight=2, died=WorkerDied("gone"))
    assert {line["custom_id"] for line in answers(tmp_path / "out")} <= {"0", "1", "2"}
    assert run(path, tmp_path / "out").num_failed == 0
    assert len(answers(tmp_path / "out")) == 10


def test_a_defect_of_a_route_is_a_500_of_its_line(tmp_path: Path) -> None:
    """The web framework answers, and raises once more for the log of a server."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await app_of(lambda *_: asyncio.sleep(0, (500, b"application/json", b"{}")))(scope, receive, send)
        raise ZeroDivisionError

    path = write_input(tmp_path, line_of("a"), line_of("b"))
    with Journal(tmp_path / "out") as journal:
        lines = read_lines(path, MAX_BYTES)
        asyncio.run(answer_lines(AppCaller(app, lambda: None), lines, journal, at_most(lambda: 2), lambda: None))
    assert [line["response"]["status_code"] for line in answers(tmp_path / "out")] == [500, 500]


def test_what_is_kept_of_many_lines_is_little(tmp_path: Path) -> None:
    """Neither the bodies nor the answers: a survey reads both files, and checks all of the input."""
    num_lines, padding = 20_000, "x" * 300
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(num_lines):
            file.write(f'{{"custom_id":"id-{number}","method":"POST","url":"{CHAT}","body":{{"x":"{padding}"}}}}\n')
    with Journal(tmp_path / "out") as journal:  # its beginning; the rest is not written line by line
        for line in itertools.islice(read_lines(path, MAX_BYTES), 1):
            journal.write(OutputLine(line.id, line.custom_id, Answer(200, line.id, msgspec.Raw(line.body)), None))
    first = (tmp_path / "out").read_text()
    with (tmp_path / "out").open("a") as file:
        for number in range(1, num_lines - 1):
            file.write(first.replace("batch_req_1", f"batch_req_{number + 1}").replace("id-0", f"id-{number}"))
    tracemalloc.start()
    try:
        with Journal(tmp_path / "out") as journal:
            assert survey(path, journal) == Survey(num_lines, num_lines)
            assert journal.num_done == num_lines - 1
        assert check_input(path, CHAT) == (num_lines, [])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 600 * num_lines  # of 900 bytes of files per line; two digests and two numbers


def test_a_malformed_last_line_is_its_own_error(tmp_path: Path) -> None:
    """With and without the end of the line, and cut within a character."""
    for end in (b'{"custom_id": "x"', b'{"custom_id": "x"\n', line_of("\u00e9").encode("utf-8")[:-3], b"\xc3", b"{"):
        path = write_input(tmp_path, *(line_of(f"{number}") for number in range(3)), end)
        target = tmp_path / "out"
        target.unlink(missing_ok=True)
        assert run(path, target).num_failed == 1
        assert [line["error"] and line["error"]["code"] for line in answers(target)] == [
            *(None, None, None),
            "invalid_json_line",
        ]
        assert [error.line for error in check_input(path, CHAT)[1]] == [4]
