#!/usr/bin/env python3
"""What patient clients get of a full server beside clients that retry at once.

usage: retry_storm.py URL [--patient 8] [--impatient 64] [--duration-s 30] [--max-tokens 16]

Every client asks for one completion after the other. After a 429, a patient client waits as Retry-After says, an
impatient one asks again at once. The table has for each class of clients: completions, those of the client with the
fewest and with the most, 429s, and the median and longest time from a request's first attempt to its answer.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass, field

import aiohttp


@dataclass(slots=True)
class Client:
    is_patient: bool
    num_refused: int = 0
    took_s: list[float] = field(default_factory=list[float])


async def keep_asking(
    client: Client, session: aiohttp.ClientSession, url: str, max_tokens: int, until_s: float
) -> None:
    for number in itertools.count():
        begin_s = time.monotonic()
        body = {"prompt": f"{id(client)} {number}", "max_tokens": max_tokens, "ignore_eos": True}
        while True:
            if time.monotonic() > until_s:
                return
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
                status, wait_s = answer.status, float(answer.headers.get("Retry-After", 1))
            if status == 200:
                client.took_s.append(time.monotonic() - begin_s)
                break
            assert status == 429, status
            client.num_refused += 1
            if client.is_patient:
                await asyncio.sleep(wait_s)


async def storm(url: str, num_patient: int, num_impatient: int, duration_s: float, max_tokens: int) -> list[Client]:
    clients = [Client(index < num_patient) for index in range(num_patient + num_impatient)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        until_s = time.monotonic() + duration_s
        await asyncio.gather(*(keep_asking(client, session, url, max_tokens, until_s) for client in clients))
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--patient", type=int, default=8)
    parser.add_argument("--impatient", type=int, default=64)
    parser.add_argument("--duration-s", type=float, default=30)
    parser.add_argument("--max-tokens", type=int, default=16)
    given = parser.parse_args()
    clients = asyncio.run(storm(given.url, given.patient, given.impatient, given.duration_s, given.max_tokens))
    print("     clients  number  completions  least   most     429s    median   longest")
    for is_patient, name in ((True, "patient"), (False, "impatient")):
        some = [client for client in clients if client.is_patient is is_patient]
        if not some:
            continue
        counts = [len(client.took_s) for client in some]
        took_s = [one for client in some for one in client.took_s] or [float("nan")]
        refused = sum(client.num_refused for client in some)
        print(
            f"{name:>12} {len(some):>7} {sum(counts):>12} {min(counts):>6} {max(counts):>6} {refused:>8} "
            f"{statistics.median(took_s):>7.2f} s {max(took_s):>7.2f} s"
        )


if __name__ == "__main__":
    main()
