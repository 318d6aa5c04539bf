"""A server, a healthy stream next to the attack, and what is found wrong in the end."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.campaign import Campaign, Report
from tests.hostile.client import ANSWER_TIMEOUT_S, REAL_ANSWER_TIMEOUT_S
from tests.hostile.footprint import fill_pools, footprint, still_grown
from tests.hostile.healthy import Health, HealthyClient, healthy_client
from tests.hostile.serving import KEY, REAL_FLAGS, load
from tests.server.live import LiveServer
from tests.server.stall_watch import StallReader, watched_serving

# The first requests of a server fill caches and pools; growth is counted from here on.
NUM_WARM_UP = 400
# Longest gaps between tokens of the healthy streams. They pass through three processes: the stall is the sharp measure.
MAX_GAP_S = 5.0
MAX_USUAL_GAP_S = 1.0  # for 99 of 100 streams


@dataclass(slots=True)
class Attacked:
    """A server under attack."""

    server: LiveServer
    stalls: StallReader
    healthy: HealthyClient
    answer_timeout_s: float


@contextlib.contextmanager
def attacked(folder: Path, flags: tuple[str, ...], stream_tokens: int) -> Iterator[Attacked]:
    with (
        watched_serving(folder, *flags) as (server, stalls),
        healthy_client(server, KEY, folder / "healthy.jsonl", stream_tokens) as healthy,
    ):
        timeout_s = REAL_ANSWER_TIMEOUT_S if flags is REAL_FLAGS else ANSWER_TIMEOUT_S
        yield Attacked(server, stalls, healthy, timeout_s)


def attack(under: Attacked, names: Sequence[str]) -> tuple[Report, Health, list[str]]:
    """Send all cases; return what was seen, and everything that is wrong."""
    campaign = Campaign(under.server, under.stalls, answer_timeout_s=under.answer_timeout_s)
    campaign.run(names[:NUM_WARM_UP])
    if not campaign.is_alive():
        return campaign.report, under.healthy.health(), list(map(str, campaign.report.failures))
    fill_pools(under.server)
    before = footprint(under.server, under.stalls)
    began_s = time.monotonic()  # a stream next to fill_pools waits for its 300 prompts
    report = campaign.run(names[NUM_WARM_UP:])
    growth = still_grown(under.server, under.stalls, before) if campaign.is_alive() else []
    health = under.healthy.health()
    found = [str(failure) for failure in sorted(report.failures, key=lambda failure: failure.problem.kind)]
    found += [f"the healthy stream: {problem}" for problem in health.problems[:5]]
    gaps = sorted((gap for at_s, gap in health.gaps if at_s > began_s), reverse=True)
    if gaps and (gaps[0] > MAX_GAP_S or gaps[len(gaps) // 100] > MAX_USUAL_GAP_S):
        found.append(f"the healthy stream waited {gaps[:5]} s for tokens")
    if campaign.is_alive() and (restarts := load(under.server)["engine_restarts"]):
        found.append(f"the engine was started again {restarts} times")
    return report, health, found + growth
