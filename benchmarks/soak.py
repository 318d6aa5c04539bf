"""A soak: a server of our own at saturation, with leavers, aborts and kills of its engine; then the books are balanced.

    python benchmarks/soak.py --minutes 20 --clients 96 --kills 2 -- --max-num-seqs 64

Every request sent must be answered, refused (429) or cancelled by us; streams must be whole (no gap, no repeat: the
token count is what was asked); at the end all blocks are free; memory must not grow. What follows `--` goes to `pagoda
serve`. The load goes to this machine's loopback interface only and stops by itself.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp


class Soak:
    """The books of one run."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.ends: Counter[str] = Counter()
        self.out_tokens = 0
        self.faults: list[str] = []
        self.rng = random.Random(seed)
        self._names = 0

    async def client(self, session: aiohttp.ClientSession, until_s: float) -> None:
        """One request after the other until the time is up."""
        while time.monotonic() < until_s:
            self.ends["sent"] += 1
            try:
                self.ends[await self._one(session)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.ends["lost"] += 1
                self.faults.append(f"{type(error).__name__}: {error}")

    async def _one(self, session: aiohttp.ClientSession) -> str:
        """Send one request; says how it ended: answered, refused, cancelled or lost."""
        rng = self.rng
        self._names += 1
        length, n = rng.randint(8, 160), rng.choice((1, 1, 1, 2))
        body = {
            "prompt": [rng.randrange(10, 40000) for _ in range(rng.randint(4, 300))],
            "max_tokens": length,
            "n": n,
            "seed": self._names,
            "temperature": rng.choice((0.0, 0.8)),
            "ignore_eos": True,
            "stream": True,
            "request_id": f"soak{self._names}",
        }
        what = rng.random()
        leave_after = rng.randint(0, length) if what < 0.1 else None
        abort_after = rng.randint(1, length) if 0.1 <= what < 0.15 else None
        chunks = [0] * n
        reasons: list[str | None] = [None] * n
        tokens = 0
        async with session.post("/v1/completions", json={**body, "return_token_ids": True}) as response:
            if response.status == 429:
                await asyncio.sleep(0.2)
                return "refused"
            if response.status != 200:
                self.faults.append(f"{response.status}: {(await response.text())[:200]}")
                return "lost"
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.faults.append(str(chunk["error"]))
                    return "lost"
                for choice in chunk["choices"]:
                    chunks[choice["index"]] += len(choice["token_ids"])
                    reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
                tokens = sum(chunks)
                if leave_after is not None and tokens >= leave_after:
                    return "cancelled"
                if abort_after is not None and tokens >= abort_after:
                    abort_after = None
                    await self._abort(session, f"cmpl-{body['request_id']}")
        self.out_tokens += tokens
        if "abort" in reasons:
            return "cancelled"
        if chunks != [length] * n or reasons != ["length"] * n:
            self.faults.append(f"asked {length} tokens for each of {n}, got {chunks}, ends {reasons}")
            return "lost"
        return "answered"

    async def _abort(self, session: aiohttp.ClientSession, request_id: str) -> None:
        async with session.post("/abort_requests", json={"request_ids": [request_id]}):
            pass


def engine_pid(server: int) -> int | None:
    """The engine process among the server's children."""
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        if b"pagoda.assembly.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return None


def resident_mib(pid: int | None) -> int | None:
    """None if the process does not exist (it was just killed)."""
    try:
        return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    except (OSError, IndexError):
        return None


async def run(args: argparse.Namespace, server: "subprocess.Popen[bytes]", url: str) -> int:
    soak = Soak(url, args.seed)
    begin_s, length_s = time.monotonic(), args.minutes * 60
    memory: list[tuple[int, int | None, int | None]] = []
    kill_at = [begin_s + length_s * (i + 1) / (args.kills + 1) for i in range(args.kills)]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        clients = [asyncio.create_task(soak.client(session, begin_s + length_s)) for _ in range(args.clients)]
        while not all(task.done() for task in clients):
            await asyncio.sleep(1)
            now_s = time.monotonic()
            if kill_at and now_s >= kill_at[0] and (pid := engine_pid(server.pid)) is not None:
                kill_at.pop(0)
                os.kill(pid, signal.SIGKILL)
                soak.ends["kills"] += 1
            if int(now_s - begin_s) >= 10 * (len(memory) + 1):
                memory.append((int(now_s - begin_s), resident_mib(server.pid), resident_mib(engine_pid(server.pid))))
                print(memory[-1], dict(soak.ends), soak.out_tokens, flush=True, file=sys.stderr)
        await asyncio.gather(*clients)
        await asyncio.sleep(1)
        async with session.get("/load") as response:
            load = await response.json()
    ends = soak.ends
    balanced = ends["sent"] == ends["answered"] + ends["refused"] + ends["cancelled"]
    result = {
        "minutes": args.minutes,
        **ends,
        "balanced": balanced,
        "out_tok_s": round(soak.out_tokens / length_s, 1),
        "load_at_end": load,
        "api_mib": [m[1] for m in memory[:: max(1, len(memory) // 8)]],
        "engine_mib": [m[2] for m in memory[:: max(1, len(memory) // 8)]],
        "faults": soak.faults[:5],
    }
    print(json.dumps(result))
    return 0 if balanced and load["kv_cache_usage"] == 0 and load["running"] == load["waiting"] == 0 else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="flags of `pagoda serve`")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pagoda", "serve", "--port", str(port), "--no-access-log", *args.serve]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_wait_ready(url))
        sys.exit(asyncio.run(run(args, server, url)))
    finally:
        server.terminate()
        server.wait(60)


async def _wait_ready(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        for _ in range(600):
            try:
                async with session.get("/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    sys.exit("the server did not get ready")


if __name__ == "__main__":
    main()
