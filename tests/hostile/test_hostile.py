"""Thousands of hostile requests next to a healthy stream: nothing breaks, stalls or grows, and its tokens are right.

A case that fails is sent alone, on a server of its own, by `python -m tests.hostile NAME`.
"""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cached_models import cached_model
from tests.hostile.attack import Attacked, attack, attacked
from tests.hostile.campaign import Campaign
from tests.hostile.cases import case_names, make_case
from tests.hostile.checks import Problem, answer_problems
from tests.hostile.client import send_case
from tests.hostile.footprint import wait_idle
from tests.hostile.serving import FAKE_FLAGS, REAL_FLAGS, get, load
from tests.server.live import LiveServer
from tests.server.stall_watch import watched_serving


def assert_unharmed(under: Attacked, names: list[str]) -> None:
    report, health, found = attack(under, names)
    assert not found, f"{report.num_cases} cases sent, {dict(report.num_alike)}\n\n" + "\n\n".join(found)
    assert report.num_cases == len(names)
    assert {200, 400, 401, 404, 405, 408, 501} <= set(report.num_answers), report.num_answers
    assert health.num_streams >= 10, health
    check_metrics(under.server)


def check_metrics(server: LiveServer) -> None:
    """No label holds what a caller sent."""
    text = get(server, "/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(samples) < 600
    assert len(text) < 200_000


def test_two_thousand_hostile_requests_break_nothing(tmp_path: Path) -> None:
    with attacked(tmp_path, FAKE_FLAGS, 300) as under:
        assert_unharmed(under, case_names(seed=1, num_fields=1_000, num_drawn=1_000))


def test_hostile_requests_while_the_engine_dies_and_while_the_server_drains(tmp_path: Path) -> None:
    names = case_names(seed=4, num_fields=200, num_drawn=200)
    with attacked(tmp_path, FAKE_FLAGS, 300) as under:
        campaign = Campaign(under.server, under.stalls, may_be_down=True)
        for number, part in enumerate((names[:100], names[100:200]), 1):
            under.server.kill_engine()
            campaign.run(part)
            end = time.monotonic() + 90
            while load(under.server)["engine_restarts"] < number or under.server.get("/health")[0] != 200:
                assert time.monotonic() < end, "no other engine is up"
                time.sleep(0.01)
        wait_idle(under.server)
        assert load(under.server)["engine_restarts"] == 2
        report = campaign.run(names[200:300])
        health = under.healthy.health()  # its gaps are as long as a start takes; its tokens are right
        found = [*map(str, report.failures), *health.problems]
        assert not found, "\n\n".join(found)
        assert under.healthy.health().num_streams >= 3

    with watched_serving(tmp_path, *FAKE_FLAGS) as (server, _):
        port = int(server.url.rsplit(":", 1)[1])

        async def flood() -> list[Problem]:
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
@pytest.mark.parametrize("seed", range(2, 12))
def test_fifty_thousand_hostile_requests_break_nothing(tmp_path: Path, seed: int) -> None:
    """Half of them are drawn, half are the enumerated ones, other ones for each seed."""
    with attacked(tmp_path, FAKE_FLAGS, 300) as under:
        assert_unharmed(under, case_names(seed, num_fields=2_500, num_drawn=2_500))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 6))
def test_hostile_requests_to_a_real_model_change_no_token(tmp_path: Path, seed: int) -> None:
    cached_model("smollm2-135m")
    with attacked(tmp_path, REAL_FLAGS, 40) as under:
        assert_unharmed(under, case_names(seed, num_fields=500, num_drawn=500))
