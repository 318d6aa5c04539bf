"""Thousands of hostile requests next to a healthy stream: nothing breaks, stalls or grows, and its tokens are right.

A case that fails is sent alone, on a server of its own, by `python -m tests.hostile NAME`.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cached_models import cached_model
from tests.hostile.campaign import Campaign, Report, num_open_files, resident_bytes
from tests.hostile.cases import NUM_SINGLE_FIELDS, case_names, make_case
from tests.hostile.checks import answer_problems
from tests.hostile.client import send_case
from tests.hostile.healthy import Health, HealthyClient, healthy_client
from tests.hostile.serving import FAKE_FLAGS, KEY, REAL_FLAGS, get, load
from tests.server.live import LiveServer
from tests.server.stall_watch import StallReader, watched_serving

# The first requests of a server fill caches and pools; growth is counted from here on.
NUM_WARM_UP = 400
MAX_GROWTH_BYTES = 96 * 2**20
# Longest gaps between tokens of the healthy streams, in wall time on shared cores: the stall is the sharp measure.
MAX_GAP_S = 5.0
MAX_USUAL_GAP_S = 1.0  # for 99 of 100 streams
# What the server remembers on purpose: no more than the vocabulary has, and no more than the cache's own bound.
CACHES = {"LibraryTokenizer._bytes": 50_000}
SETTLE_S = 30.0  # work for clients that have left ends by itself, within the deadlines of its own


@dataclass(slots=True)
class Attacked:
    """A server under attack."""

    server: LiveServer
    stalls: StallReader
    healthy: HealthyClient


@contextlib.contextmanager
def attacked(folder: Path, flags: tuple[str, ...], stream_tokens: int) -> Iterator[Attacked]:
    with (
        watched_serving(folder, *flags) as (server, stalls),
        healthy_client(server.url, KEY, folder / "healthy.jsonl", stream_tokens) as healthy,
    ):
        yield Attacked(server, stalls, healthy)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server at rest holds."""

    api_bytes: int
    engine_bytes: int
    num_files: int
    objects: dict[str, int]


def footprint(under: Attacked) -> Footprint:
    wait_idle(under.server)
    pid = under.server.process.pid
    objects = under.stalls.census()
    return Footprint(resident_bytes(pid), resident_bytes(under.server.engine_pid()), num_open_files(pid), objects)


def wait_idle(server: LiveServer, timeout_s: float = 60.0) -> None:
    """Until nothing but (at times) the healthy stream is live."""
    end_s = time.monotonic() + timeout_s
    while (now := load(server))["server_load"] or now["running"] or now["waiting"] or now["kv_cache_usage"]:
        assert time.monotonic() < end_s, f"the server does not come to rest: {now}"
        time.sleep(0.01)
    assert now["live_tokens"] == 0, now


def grown(before: Footprint, after: Footprint) -> list[str]:
    """What a server holds more of than before."""
    found = [
        f"{name} grew by {(more - less) >> 20} MiB"
        for name, less, more in (
            ("the API process", before.api_bytes, after.api_bytes),
            ("the engine process", before.engine_bytes, after.engine_bytes),
        )
        if more - less > MAX_GROWTH_BYTES
    ]
    if after.num_files > before.num_files + 12:  # connections that are being closed just now
        found.append(f"{after.num_files} open files, {before.num_files} before")
    # A healthy request may begin while objects are counted: some entries more are no growth.
    return found + [
        f"{name}: {count}, {before.objects.get(name, 0)} before"
        for name, count in after.objects.items()
        if count > max(before.objects.get(name, 0) + 48, CACHES.get(name, 0))
    ]


def still_grown(under: Attacked, before: Footprint) -> list[str]:
    """What a server goes on holding."""
    end_s = time.monotonic() + SETTLE_S
    while found := grown(before, footprint(under)):
        if time.monotonic() > end_s:
            return found
        time.sleep(0.5)
    return []


def check_metrics(server: LiveServer) -> None:
    """No label holds what a caller sent."""
    text = get(server, "/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(samples) < 600
    assert len(text) < 200_000


def verdict(report: Report, health: Health) -> list[str]:
    found = [str(failure) for failure in report.failures]
    found += [f"the healthy stream: {problem}" for problem in health.problems[:5]]
    gaps = sorted((gap for _, gap in health.gaps), reverse=True)
    if gaps and (gaps[0] > MAX_GAP_S or gaps[len(gaps) // 100] > MAX_USUAL_GAP_S):
        found.append(f"the healthy stream waited {gaps[:5]} s for tokens")
    return found


def attack(under: Attacked, names: list[str]) -> None:
    campaign = Campaign(under.server, under.stalls)
    campaign.run(names[:NUM_WARM_UP])
    before = footprint(under)
    report = campaign.run(names[NUM_WARM_UP:])
    assert campaign.is_alive(), "\n\n".join(verdict(report, under.healthy.health()))
    growth = still_grown(under, before)
    health = under.healthy.health()
    found = [*verdict(report, health), *growth]
    assert not found, f"{report.num_cases} cases sent, {dict(report.num_alike)}\n\n" + "\n\n".join(found)
    assert load(under.server)["engine_restarts"] == 0
    assert report.num_cases == len(names)
    assert {200, 400, 401, 404, 405, 408, 501} <= set(report.num_answers), report.num_answers
    assert health.num_streams >= 10, health
    check_metrics(under.server)


def test_two_thousand_hostile_requests_break_nothing(tmp_path: Path) -> None:
    with attacked(tmp_path, FAKE_FLAGS, 300) as under:
        attack(under, case_names(seed=1, num_fields=1_000, num_drawn=1_000))


def test_hostile_requests_while_the_engine_dies_and_while_the_server_drains(tmp_path: Path) -> None:
    names = case_names(seed=4, num_fields=200, num_drawn=200)
    with attacked(tmp_path, FAKE_FLAGS, 300) as under:
        campaign = Campaign(under.server, under.stalls, may_be_down=True)
        for part in (names[:100], names[100:200]):
            under.server.kill_engine()
            campaign.run(part)
        wait_idle(under.server)
        assert load(under.server)["engine_restarts"] == 2
        report = campaign.run(names[200:300])
        health = under.healthy.health()  # its gaps are as long as a start takes; its tokens are right
        found = [*map(str, report.failures), *health.problems]
        assert not found, "\n\n".join(found)
        assert under.healthy.health().num_streams >= 3

    with watched_serving(tmp_path, *FAKE_FLAGS) as (server, _):
        port = int(server.url.rsplit(":", 1)[1])

        async def flood() -> list[str]:
            sent = [asyncio.create_task(send_case(make_case(name), port)) for name in names[300:]]
            await asyncio.sleep(0.05)
            server.process.send_signal(signal.SIGTERM)
            answers = [answer for outcome in await asyncio.gather(*sent) for answer in outcome.answers]
            assert answers
            return [problem for answer in answers for problem in answer_problems(answer, may_be_down=True)]

        assert asyncio.run(flood()) == []
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_fifty_thousand_hostile_requests_break_nothing(tmp_path: Path) -> None:
    """Every place of every route with every hostile value, and more."""
    with attacked(tmp_path, FAKE_FLAGS, 300) as under:
        attack(under, case_names(seed=2, num_fields=NUM_SINGLE_FIELDS, num_drawn=50_000 - NUM_SINGLE_FIELDS))


@pytest.mark.slow
def test_hostile_requests_to_a_real_model_change_no_token(tmp_path: Path) -> None:
    cached_model("smollm2-135m")
    with attacked(tmp_path, REAL_FLAGS, 40) as under:
        attack(under, case_names(seed=3, num_fields=1_500, num_drawn=1_500))
