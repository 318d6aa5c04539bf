"""A client in a process of its own with random requests: `python -m`, with the socket of the ClientServer, a seed, and
which of the seed's requests to run, as JSON. It writes a line for each that has ended, and ends after the last one.

All clients use the same few request ids.
"""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.remote_client import RemoteClient
from pagoda.engine.outputs.output_processor import OutputKind
from tests.fake_engine import byte_inputs
from tests.generate import prepare

AT_ONCE = 6
Tokens = list[list[int]]


@dataclass(frozen=True)
class RandomRequest:
    """leaves_after: its client leaves when it has so many tokens of the first sequence; None: it stays."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    leaves_after: int | None


def random_requests(seed: int, count: int) -> list[RandomRequest]:
    rng = random.Random(seed)
    begins = [[rng.randrange(250) for _ in range(40)] for _ in range(3)]
    return [
        RandomRequest(
            prompt=rng.choice(begins)[: rng.randrange(1, 40)] + [rng.randrange(250)] * rng.randrange(1, 30),
            params=SamplingParams(
                n=rng.choice((1, 1, 3)), max_tokens=rng.randrange(1, 90), seed=rng.randrange(10**6), ignore_eos=True
            ),
            priority=rng.choice((0, 0, 1)),
            leaves_after=rng.randrange(20) if rng.random() < 0.2 else None,
        )
        for _ in range(count)
    ]


async def run_some(
    llm: AsyncEngine, requests: list[RandomRequest], which: Iterable[int], on_end: Callable[[int, Tokens], object]
) -> None:
    """Run requests, a few at once.   on_end: called with the number of one that has ended, and its tokens."""
    places = asyncio.Queue[str]()
    for place in range(AT_ONCE):
        places.put_nowait(f"request-{place}")

    async def run(number: int) -> None:
        one, name = requests[number], await places.get()
        request = await prepare(llm, one.prompt, one.params, name, priority=one.priority)
        tokens: Tokens = [[] for _ in range(request.num_seqs)]
        async with contextlib.aclosing(llm.stream(request, OutputKind.DELTA)) as outputs:
            async for output in outputs:
                assert output.error is None, output.error
                for part in output.outputs:
                    tokens[part.index].extend(part.token_ids)
                if one.leaves_after is not None and len(tokens[0]) > one.leaves_after:
                    break
        on_end(number, tokens)
        places.put_nowait(name)

    await asyncio.gather(*map(run, which))


async def main(path: str, seed: int, which: list[int]) -> None:
    client = RemoteClient(path)
    await client.start()
    inputs = byte_inputs()
    inputs.client_index = client.index
    async with AsyncEngine(client, inputs) as llm:
        requests = random_requests(seed, max(which) + 1)
        await run_some(llm, requests, which, lambda *end: print(json.dumps(end), flush=True))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
