"""The hostile tests' own instruments: what they are there to find, they find."""

import asyncio
import hashlib
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
from tests.hostile.checks import problems
from tests.hostile.client import Answer, Outcome
from tests.hostile.json_text import Deep, Flood, FloodOfKeys, Pairs, Raw, write
from tests.hostile.shrink import shrink
from tests.server.stall_watch import StallReader, StallWatch

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


def test_cases_are_of_all_kinds_and_sizes() -> None:
    cases = [make_case(name) for name in case_names(1, 1_000, 1_000)]
    assert len({case.kind for case in cases}) >= 18
    assert max(case.num_bytes for case in cases) > 8 * 2**20
    assert any(b"\\ud800" in piece for case in cases for piece in case.pieces)
    assert {case.leave for case in cases} == set(Leave)
    assert {case.expect for case in cases} == set(Expect)


def test_what_is_no_json_is_written_as_it_is() -> None:
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
        (Outcome([Answer(400, {}, GOOD_ERROR.replace(b"no", b"no" * 3_000), True)]), "an error of 6079 bytes"),
        (Outcome([Answer(400, {}, GOOD_ERROR.replace(b"no", b"internal error: KeyError"), True)]), "does not say"),
        (Outcome([Answer(501, {}, GOOD_ERROR, True)]), "x-should-retry"),
        (Outcome([Answer(501, {"x-should-retry": "false"}, GOOD_ERROR, True)]), ""),
        (Outcome([Answer(200, {}, b'{"a"', False)]), "was cut"),
        (Outcome([Answer(200, {"content-type": "text/event-stream"}, b"data: {}\n\n", True)]), "a stream that ends"),
        (Outcome([Answer(200, {"content-type": "text/event-stream"}, b"data: {}\n\ndata: [DONE]\n\n", True)]), ""),
        (Outcome(), "0 answers to 1 requests"),
        (Outcome(problem="no complete answer within 15 s"), "no complete answer"),
    ],
)
def test_bad_answers_are_found(outcome: Outcome, found: str) -> None:
    said = "; ".join(problems(CASE, outcome))
    assert (found in said) if found else not said


def test_a_request_that_never_was_complete_is_not_served() -> None:
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


def test_waiting_for_a_core_is_no_stall(tmp_path: Path) -> None:
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

    reader = StallReader(tmp_path)
    journal = Journal()
    got: list[dict[str, int]] = []

    async def main() -> None:
        await StallWatch(tmp_path).run()
        got.append(await asyncio.to_thread(reader.census))

    asyncio.run(main())
    (counts,) = got
    assert counts["Journal"] >= 1
    assert [name for name in counts if name.startswith("Journal.")]
    assert counts["tasks"] >= 1
    assert counts["threads"] >= threading.active_count() - 3
    del journal


def test_a_failing_case_shrinks_to_what_makes_it_fail() -> None:
    body = {"prompt": "x" * 500 + "\ud800" + "y" * 300, "stop": ["a", "b"], "n": 2, "nested": {"list": list(range(50))}}
    case = Case("0:0", "", "", (request("/v1/completions", write(body), b"X-Extra: 1"),))

    def fails(case: Case) -> bool:
        head, _, sent = b"".join(case.pieces).partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(sent) in head or b"Content-Length:" not in head
        return b"\\ud800" in sent and b"Authorization" in head

    small = shrink(case, fails)
    assert small.num_bytes < 60
    head, _, sent = small.pieces[0].partition(b"\r\n\r\n")
    assert (b"Authorization" in head, json.loads(sent)) == (True, {"prompt": "\ud800"})


def test_a_body_that_is_not_json_shrinks_by_bytes() -> None:
    case = Case("0:0", "", "", (request("/", b"[" * 3_000 + b"\x00" + b"]" * 3_000),))
    small = shrink(case, lambda case: b"\x00" in b"".join(case.pieces))
    assert small.num_bytes < 10
    assert shrink(case, lambda _: True, max_tries=3).num_bytes > 500
