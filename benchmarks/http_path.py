#!/usr/bin/env python3
"""The HTTP path alone: streamed tokens per second from API processes, over an engine that computes nothing.

usage: http_path.py [--streams 64] [--tokens 1500] [--processes 1] [--profile FILE] [-- flags of `pagoda serve`]

The server runs with the fake executor. Clients read raw bytes and count events, so that they cost next to nothing;
the CPU time of the API side is read from the system, since on a small machine client, engine and API share cores. With
several processes (`--api-server-count`), it is that of all, and of their parent, which passes messages on.
`--profile` runs the API process under cProfile (slower) and writes the statistics there.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

EVENT = b"data: {"


async def stream(port: int, num_tokens: int) -> int:
    """One streamed completion over a connection of its own; the number of events it brought."""
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    count, kept = 0, b""
    while data := await reader.read(1 << 16):
        data = kept + data
        count += data.count(EVENT)
        kept = data[-len(EVENT) + 1 :]  # an event's beginning may be cut; too short to be counted twice
    writer.close()
    return count


async def all_streams(port: int, num_streams: int, num_tokens: int) -> int:
    return sum(await asyncio.gather(*(stream(port, num_tokens) for _ in range(num_streams))))


def cpu_seconds(pid: int) -> float:
    """User and system time of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_processes(server: int) -> list[int]:
    """The processes of the API side that the server has started."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [int(pid) for pid in children if b"api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_ready(port: int, timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    sys.exit("the server did not get ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("serve", nargs="*", help="flags of `pagoda serve`")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    profiler = ["-m", "cProfile", "-o", str(args.profile)] if args.profile else []
    flags = ["--port", str(port), "--distributed-executor-backend", "fake", "--no-access-log"]
    flags += ["--api-server-count", str(args.processes), *args.serve]
    server = subprocess.Popen([sys.executable, *profiler, "-m", "pagoda", "serve", *flags])
    try:
        wait_ready(port)
        while len(pids := api_processes(server.pid)) < args.processes and args.processes > 1:
            time.sleep(0.05)
        asyncio.run(all_streams(port, args.streams, 50))
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            before, begin_s = [cpu_seconds(pid) for pid in (server.pid, *pids)], time.perf_counter()
            events = asyncio.run(all_streams(port, args.streams, args.tokens))
            wall_s = time.perf_counter() - begin_s
            spent = [cpu_seconds(pid) - was for pid, was in zip((server.pid, *pids), before, strict=True)]
            cpu_s = sum(spent)
            tokens = args.streams * args.tokens
            rounds.append(
                {
                    "tokens_s": round(tokens / wall_s),
                    "api_cpu_us_per_token": round(cpu_s / tokens * 1e6, 1),
                    "of_each_process": [round(one / tokens * 1e6, 1) for one in spent],
                    "tokens_per_api_cpu_s": round(tokens / cpu_s),
                    "events_per_token": round(events / tokens, 3),
                }
            )
        print(
            json.dumps({"streams": args.streams, "tokens": args.tokens, "processes": args.processes, "rounds": rounds})
        )
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
