"""What a server at rest holds, in both of its processes, and whether it holds more than before."""

import base64
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.serving import KEY, load
from tests.hostile.tensor_bodies import HIDDEN, one_tensor
from tests.server.census import KEPT
from tests.server.live import LiveServer
from tests.server.stall_watch import StallReader

MAX_GROWTH_BYTES = 96 * 2**20
MAX_MORE_OBJECTS = 48  # of one class, or in one of its containers: a healthy request may begin during the count
MAX_MORE_OF_ALL = 4_000  # of any type, Python's own and the libraries' included
MAX_MORE_FILES = 12  # connections that are being closed
BLOCK_TOKENS = 16
SETTLE_S = 30.0  # work for clients that have left ends by itself, within the deadlines of its own
# What is remembered on purpose: no more than the vocabulary has, the KV cache has blocks, or the cache's own bound.
CACHES = {
    "LibraryTokenizer._bytes": 50_000,
    "LibraryVocabulary.tokens": 50_000,
    "StopTokens._ends": 50_000,
    "PrefixCache._hash_of": 512,
}


@dataclass(frozen=True, slots=True)
class ProcessFootprint:
    """objects: see count_objects."""

    num_bytes: int
    num_files: int
    objects: dict[str, int]


Footprint = dict[str, ProcessFootprint]
"""By the process: "api" and "engine"."""


def footprint(server: LiveServer, stalls: StallReader) -> Footprint:
    """Wait until nothing runs, and count."""
    wait_idle(server)
    pids = {"api": server.process.pid, "engine": server.engine_pid()}
    return {
        name: ProcessFootprint(_resident_bytes(pid), _num_open_files(pid), stalls.census(name))
        for name, pid in pids.items()
    }


def fill_pools(server: LiveServer, num_blocks: int = 512) -> None:
    """Use all that the engine has once: the blocks of its KV cache, buffers for its largest steps, programs.

    The system gives a process its pages when they are first written. The native engine keeps two programs: one of
    steps of tokens alone, and one of steps in which a prompt is embeddings.
    """

    def complete(**fields: object) -> None:
        body = {"max_tokens": 1, **fields}
        assert server.post("/v1/completions", body, Authorization=f"Bearer {KEY}")[0] == 200

    num_tokens, num_written = 480, 0
    while num_written < 1.2 * num_blocks * BLOCK_TOKENS:  # others' blocks may be in use, and some are written again
        complete(prompt=[100 + num_written // num_tokens] * num_tokens)
        num_written += num_tokens
    complete(prompt=[99] * num_tokens, prompt_logprobs=20)
    complete(prompt=[[i] * 8 for i in range(300)], logprobs=20)
    complete(prompt="", prompt_embeds=base64.b64encode(one_tensor(2, bytes(2 * HIDDEN * 4))).decode())


def wait_idle(server: LiveServer, timeout_s: float = 60.0) -> None:
    """Wait until at most the healthy stream is running."""
    end_s = time.monotonic() + timeout_s
    while (now := load(server))["server_load"] or now["running"] or now["waiting"] or now["kv_cache_usage"]:
        assert time.monotonic() < end_s, f"the server does not come to rest: {now}"
        time.sleep(0.01)
    assert now["live_tokens"] == 0, now


def grown(before: Footprint, after: Footprint) -> list[str]:
    """What a server holds more of than before."""
    found = []
    for name, now in after.items():
        then = before[name]
        if now.num_bytes - then.num_bytes > MAX_GROWTH_BYTES:
            found.append(f"the {name} process grew by {(now.num_bytes - then.num_bytes) >> 20} MiB")
        if now.num_files > then.num_files + MAX_MORE_FILES:
            found.append(f"the {name} process has {now.num_files} open files, {then.num_files} before")
        for kind, count in now.objects.items():
            if kind == KEPT:  # among "all objects"
                continue
            allowed = MAX_MORE_OF_ALL if kind == "all objects" else MAX_MORE_OBJECTS
            if count > max(then.objects.get(kind, 0) + allowed, CACHES.get(kind, 0)):
                found.append(f"{kind} in the {name} process: {count}, {then.objects.get(kind, 0)} before")
    return found


def still_grown(server: LiveServer, stalls: StallReader, before: Footprint) -> list[str]:
    """What a server keeps holding."""
    end_s = time.monotonic() + SETTLE_S
    while found := grown(before, footprint(server, stalls)):
        if time.monotonic() > end_s:
            return found
        time.sleep(0.5)
    return []


def _resident_bytes(pid: int) -> int:
    """Memory of a process, as the kernel counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def _num_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
