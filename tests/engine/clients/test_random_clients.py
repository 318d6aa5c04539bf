"""Random requests of several processes over one engine: kills of it and of them change no token and lose no request."""

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from pagoda.base.config import EngineConfig
from pagoda.core.request import RequestKey
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.client_server import ClientServer
from pagoda.engine.clients.process_client import ProcessClient
from tests.engine.clients.engine_in_process import kill, run_engine
from tests.engine.clients.hurried_clock import STEP_TIMEOUT_S
from tests.engine.clients.random_user import AT_ONCE, Tokens, random_requests, run_some
from tests.engine.steps import Steps

OPTIONS = {"distributed_executor_backend": "fake", "num_blocks": 40, "max_model_len": 256, "max_num_seqs": 16}
NUM_USERS, NUM_REQUESTS = 3, 30
KILLS = ("engine", "user", "both")


class User:
    """A client in a process of its own, which is started again with what it has left when it is killed."""

    def __init__(self, path: str, seed: int) -> None:
        self._path, self._seed = path, seed
        self.left = set(range(NUM_REQUESTS))
        self.ended: dict[int, Tokens] = {}
        self.num_kills = 0
        self._pid: int | None = None  # while it runs and has not been killed

    async def run(self) -> None:
        while self.left:
            command = (sys.executable, "-m", "tests.engine.clients.random_user", self._path, str(self._seed))
            which = json.dumps(sorted(self.left))
            process = await asyncio.create_subprocess_exec(*command, which, stdout=asyncio.subprocess.PIPE)
            assert process.stdout is not None
            self._pid = process.pid
            async for line in process.stdout:
                number, tokens = json.loads(line)
                self.left.remove(number)
                self.ended[number] = tokens
            self._pid = None
            code = await process.wait()
            assert code in (0, -signal.SIGKILL)
            assert code or not self.left

    @property
    def can_be_killed(self) -> bool:
        """Whether it has enough left not to end before it is."""
        return len(self.left) > 10 and self._pid is not None

    def kill(self) -> None:
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        self._pid = None
        self.num_kills += 1


async def release_full(steps: Steps, client: ProcessClient) -> None:
    """Let the engine compute once it has all requests that its users run at once, which preempt one another."""
    while len(client._journal) < NUM_USERS * AT_ONCE:
        await asyncio.sleep(0.002)
    steps.release()


async def kill_at_random(rng: random.Random, client: ProcessClient, users: list[User]) -> None:
    """Kill each kind once, after random numbers of ends."""
    for kind in rng.sample(KILLS, len(KILLS)):
        num_ended = sum(len(user.ended) for user in users) + rng.randrange(3, 15)
        while sum(len(user.ended) for user in users) < num_ended or not client.is_up:
            await asyncio.sleep(0.001)
        if kind != "engine":
            while not (killable := [user for user in users if user.can_be_killed]):
                await asyncio.sleep(0.001)
            rng.choice(killable).kill()
        if kind != "user":
            await kill(client)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_tokens_of_several_processes_are_those_of_one_through_kills_of_it_and_of_the_engine(
    seed: int, tmp_path: Path, steps: Steps
) -> None:
    rng = random.Random(seed)
    config = EngineConfig.from_options(**OPTIONS, scheduling_policy="priority")

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        left_behind: list[RequestKey] = []
        server = ClientServer(
            client,
            client._supervisor._sizes,
            on_left=lambda index: left_behind.extend(client._journal.of_client(index)),
        )
        await server.start(str(tmp_path / "clients"))
        users = [User(str(tmp_path / "clients"), 10 * seed + number) for number in range(NUM_USERS)]
        happened = Counter[str]()
        client.on_events = lambda events: happened.update(type(event).__name__ for event in events)
        steps.hold_after(0)
        released = asyncio.create_task(release_full(steps, client))
        kills = asyncio.create_task(kill_at_random(rng, client, users))
        await asyncio.gather(*(user.run() for user in users))
        await asyncio.gather(kills, released)
        assert client.num_deaths == 2
        assert sum(user.num_kills for user in users) == 2
        assert happened["Preempted"]
        while client.stats().num_running or client.stats().num_waiting or client.stats().kv_usage:
            await asyncio.sleep(0.01)
        assert len(client._journal) == 0
        assert left_behind == []
        await server.close()
        for user in users:
            requests, alone = random_requests(user._seed, NUM_REQUESTS), dict[int, Tokens]()
            await run_some(llm, requests, range(NUM_REQUESTS), alone.__setitem__)
            for number, tokens in user.ended.items():
                if requests[number].leaves_after is None:
                    assert tokens == alone[number]
                else:
                    pairs = list(zip(tokens, alone[number], strict=True))
                    assert all(some[: len(other)] == other[: len(some)] for some, other in pairs)
                    assert len(tokens[0]) > min(requests[number].leaves_after, len(alone[number][0]) - 1)

    run_engine(work, ProcessClient(config, STEP_TIMEOUT_S, "tests.engine.stepped_engine"), config)
