"""The hostile tests' own instruments: what they are there to find, they find."""

import asyncio
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.hostile.case import Case, Expect, Leave, request
from tests.hostile.cases import NUM_SINGLE_FIELDS, case_names, make_case
from tests.hostile.checks import Problem, problems
from tests.hostile.client import Answer, Outcome
from tests.hostile.footprint import footprint, grown
from tests.hostile.healthy import CoreWaits, stream
from tests.hostile.json_text import Deep, Flood, FloodOfKeys, Pairs, Raw, write
from tests.hostile.serving import FAKE_FLAGS, KEY
from tests.hostile.shrink import shrink
from tests.server.census import CensusReader, CensusTaker
from tests.server.stall_watch import StallReader, StallWatch, watched_serving

GOOD_ERROR = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":400}}'
CASE = Case("0:0", "", "", (b"",))


def digest(names: list[str]) -> str:
    return hashlib.sha256(b"".join(b"".join(make_case(name).pieces) for name in names)).hexdigest()


def test_a_case_is_the_same_in_every_process() -> None:
    names = case_names(7, 60, 140)
    assert len(set(names)) == 200
    script = f"from tests.hostile.test_harness import digest; print(digest({names!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "99", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == digest(names)


def test_all_places_of_all_routes_meet_all_values() -> None:
    names = case_names(2, NUM_SINGLE_FIELDS, 0)
    assert len(set(names)) == NUM_SINGLE_FIELDS > 30_000


def test_the_long_test_sends_fifty_thousand_different_cases() -> None:
    names = [name for seed in range(2, 12) for name in case_names(seed, 2_500, 2_500)]
    assert len(set(names)) == 50_000


def test_cases_are_of_all_kinds_and_sizes() -> None:
    cases = [make_case(name) for name in case_names(1, 1_000, 1_000)]
    assert len({case.kind for case in cases}) >= 18
    assert max(case.num_bytes for case in cases) > 8 * 2**20
    assert any(b"\\ud800" in piece for case in cases for piece in case.pieces)
    assert {case.leave for case in cases} == set(Leave)
    assert {case.expect for case in cases} == set(Expect)


def test_a_body_that_is_not_json_is_written_as_it_is() -> None:
    value = {"a": [Raw(b"NaN"), "\ud800", Flood("x{}", 2, fresh=True), Flood(1, 3)], "b": Deep(2, as_objects=True)}
    assert write(value) == b'{"a":[NaN,"\\ud800",["x0","x1"],[1,1,1]],"b":{"a":{"a":1}}}'
    assert write(Pairs((("a", 1), ("a", 2)))) == b'{"a":1,"a":2}'
    assert write(FloodOfKeys(None, 2)) == b'{"0":null,"1":null}'


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        (Outcome([Answer(400, {}, GOOD_ERROR, True)]), ""),
        (Outcome([Answer(500, {}, GOOD_ERROR, True)]), "status 500"),
        (Outcome([Answer(503, {}, GOOD_ERROR, True)]), "status 503"),
        (Outcome([Answer(400, {}, b"no", True)]), "OpenAI's shape"),
        (Outcome([Answer(400, {}, b'{"error":{"message":"no","type":"a"}}', True)]), "OpenAI's shape"),
        (Outcome([Answer(400, {}, GOOD_ERROR.replace(b"no", b"no" * 3_000), True)]), "6079 bytes"),
        (Outcome([Answer(400, {}, GOOD_ERROR.replace(b"no", b"internal error: KeyError"), True)]), "does not say"),
        (Outcome([Answer(501, {}, GOOD_ERROR, True)]), "x-should-retry"),
        (Outcome([Answer(501, {"x-should-retry": "false"}, GOOD_ERROR, True)]), ""),
        (Outcome([Answer(200, {}, b'{"a"', False)]), "was cut"),
        (
            Outcome([Answer(200, {"content-type": "text/event-stream"}, b"data: {}\n\n", True)]),
            "a stream that does not end",
        ),
        (Outcome([Answer(200, {"content-type": "text/event-stream"}, b"data: {}\n\ndata: [DONE]\n\n", True)]), ""),
        (Outcome(), "0 to 1 requests"),
        (Outcome(problem="no complete answer in time"), "no complete answer"),
    ],
)
def test_bad_answers_are_found(outcome: Outcome, found: str) -> None:
    said = "; ".join(map(str, problems(CASE, outcome)))
    assert (found in said) if found else not said


def test_an_incomplete_request_is_not_served() -> None:
    case = Case("0:0", "", "", (b"",), expect=Expect.REFUSED)
    assert problems(case, Outcome([Answer(200, {}, b"{}", True)]))
    assert not problems(case, Outcome([Answer(408, {}, GOOD_ERROR, True)]))


def test_only_a_client_that_half_closes_may_find_its_answer_cut() -> None:
    cut = Outcome([Answer(200, {"transfer-encoding": "chunked"}, b"", False)])
    for leave in Leave:
        case = Case("0:0", "", "", (b"",), leave=leave, expect=Expect.NOTHING)
        assert bool(problems(case, cut)) is (leave is not Leave.HALF)
    left = Case("0:0", "", "", (b"",), leave=Leave.HALF, expect=Expect.NOTHING)
    assert problems(left, Outcome([Answer(500, {}, GOOD_ERROR, True)]))


def measured(folder: Path, block_s: float = 0.0) -> float:
    """What a StallWatch says of a loop that sleeps, or blocks for `block_s`."""
    reader = StallReader(folder)

    async def main() -> float:
        await StallWatch(folder).run()
        await asyncio.sleep(0.1)
        await asyncio.to_thread(reader.take)
        if block_s:
            time.sleep(block_s)
        await asyncio.sleep(0.1)
        return await asyncio.to_thread(reader.take)

    return asyncio.run(main())


def test_a_blocked_loop_is_a_stall_and_its_stack_is_kept(tmp_path: Path) -> None:
    assert 0.25 < measured(tmp_path, block_s=0.3) < 1.5
    stalls = StallReader(tmp_path).stalls()
    assert any("time.sleep(block_s)" in "".join(stall["stack"]) for stall in stalls)


def test_waiting_for_a_core_is_not_a_stall(tmp_path: Path) -> None:
    """Four processes compute on the one core that the loop may use: it waits, and is not blamed."""
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        time.sleep(0.3)
        assert measured(tmp_path) < 0.1
    finally:
        os.sched_setaffinity(0, before)
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def test_a_census_counts_what_containers_hold(tmp_path: Path) -> None:
    from pagoda.engine.clients.journal import Journal

    reader = CensusReader(tmp_path, "this")
    CensusTaker(tmp_path, "this").start()
    before = reader.take()
    journals = [Journal() for _ in range(2_000)]
    counts = reader.take()
    assert counts["Journal"] == before.get("Journal", 0) + 2_000
    assert [name for name in counts if name.startswith("Journal.")]
    assert counts["all objects"] >= before["all objects"] + 1_000  # earlier tests' objects may go at the same time
    assert counts["threads"] == threading.active_count()
    del journals


def test_an_engine_that_leaks_is_detected(tmp_path: Path) -> None:
    with watched_serving(tmp_path, *FAKE_FLAGS, engine="tests.hostile.leaking_engine") as (server, stalls):

        def ask(num_requests: int) -> None:
            for _ in range(num_requests):
                body = {"prompt": ["Hi"] * 10, "max_tokens": 1}
                assert server.post("/v1/completions", body, Authorization=f"Bearer {KEY}")[0] == 200

        ask(2)
        before = footprint(server, stalls)
        assert before["engine"].objects["Request"] == 20
        assert grown(before, footprint(server, stalls)) == []
        ask(10)
        found = "; ".join(grown(before, footprint(server, stalls)))
    assert "Request in the engine process: 120, 20 before" in found
    assert "the engine process grew by 1" in found
    assert "api" not in found


def test_a_failing_case_shrinks_to_what_makes_it_fail() -> None:
    body = {"prompt": "x" * 500 + "\ud800" + "y" * 300, "stop": ["a", "b"], "n": 2, "nested": {"list": list(range(50))}}
    case = Case("0:0", "", "", (request("/v1/completions", write(body), b"X-Extra: 1"),))

    def failure(case: Case) -> Problem | None:
        head, _, sent = b"".join(case.pieces).partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(sent) in head or b"Content-Length:" not in head
        return Problem("fails") if b"\\ud800" in sent and b"Authorization" in head else None

    small = shrink(case, failure, "fails")
    assert small.num_bytes < 60
    head, _, sent = small.pieces[0].partition(b"\r\n\r\n")
    assert (b"Authorization" in head, json.loads(sent)) == (True, {"prompt": "\ud800"})


def test_a_body_that_is_not_json_shrinks_by_bytes() -> None:
    case = Case("0:0", "", "", (request("/", b"[" * 3_000 + b"\x00" + b"]" * 3_000),))
    fails = Problem("fails")
    small = shrink(case, lambda case: fails if b"\x00" in b"".join(case.pieces) else None, "fails")
    assert small.num_bytes < 10
    assert shrink(case, lambda _: fails, "fails", max_tries=3).num_bytes > 500


def answered(status: int, message: str) -> Problem:
    error = {"message": message, "type": "a", "param": None, "code": status}
    (problem,) = problems(CASE, Outcome([Answer(status, {}, json.dumps({"error": error}).encode(), True)]))
    return problem


def test_failures_are_alike_if_only_the_values_of_their_cases_differ() -> None:
    assert answered(500, "internal error: KeyError: 'a'").kind == answered(500, "internal error: KeyError: 'b c'").kind
    assert answered(500, "internal error: KeyError: 'a'").kind != answered(500, "internal error: TypeError: 'a'").kind
    assert answered(500, "internal error: KeyError: 'a'").kind != answered(502, "internal error: KeyError: 'a'").kind
    assert answered(400, "no " * 2_000).kind == answered(400, "no " * 3_000).kind
    assert answered(400, "no " * 2_000).kind != answered(400, "yes " * 2_000).kind
    assert answered(400, "internal error: 1").kind != answered(400, "stop: internal error: 1").kind


def test_shrinking_keeps_to_the_kind_of_the_failure() -> None:
    """A smaller body fails, too, but with an error of its own: it is not a smaller version of the first failure."""
    case = Case("0:0", "", "", (request("/", write({"stop": "\ud800" * 3, "n": 1, "a": "x" * 400})),))

    def failure(case: Case) -> Problem:
        sent = b"".join(case.pieces).partition(b"\r\n\r\n")[2]
        body = json.loads(sent) if sent else {}
        if "\ud800" in body.get("stop", ""):
            return answered(500, f"internal error: UnicodeEncodeError at {len(sent)}")
        return answered(500, "internal error: KeyError: 'stop'")

    first = failure(case)
    small = shrink(case, failure, first.kind)
    assert json.loads(b"".join(small.pieces).partition(b"\r\n\r\n")[2]) == {"stop": "\ud800"}
    assert failure(small).kind == first.kind


def test_the_healthy_client_comes_again_when_a_full_server_says_so() -> None:
    """Refusals are no problem of the stream, and the time until the client may come again is no gap."""
    answers = [(429, b'{"error":{}}')] * 2 + [(200, b'data: {"choices":[{"token_ids":[5, 6]}]}\n\ndata: [DONE]\n\n')]

    class FullTwice(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = answers.pop(0)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 429:
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FullTwice) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began_s = time.monotonic()
        tokens, longest_s, problem = stream(f"127.0.0.1:{server.server_port}", KEY, 2, CoreWaits([]))
        took_s = time.monotonic() - began_s
        server.shutdown()
    assert (tokens, problem, answers) == ([5, 6], "", [])
    assert longest_s < took_s - 1.9  # two refusals of a second each
