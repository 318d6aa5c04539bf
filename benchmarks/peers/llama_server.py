"""llama-server over HTTP: start it, ask it, and how long both take. Also a runner for compare.py.

usage: llama_server.py LLAMA_SERVER MODEL.gguf WORKLOAD.json

Every request of the workload is sent at once, one slot each; prompts are token ids.
"""

import concurrent.futures
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

_READY_S = 120.0


class LlamaServer:
    """A running llama-server; ends with the `with` block.

    begin_s, ready_s: time.perf_counter() at which it was started, and seconds from then until it was ready.
    """

    def __init__(
        self, program: str, model: str, slots: int = 1, tokens_per_slot: int = 2048, more: Sequence[str] = ()
    ) -> None:
        """more: flags."""
        threads = str(len(os.sched_getaffinity(0)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the server runs
        command = [
            program,
            "-m",
            model,
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "-t",
            threads,
            "-tb",
            threads,
        ]
        command += ["-np", str(slots), "-c", str(slots * -(-tokens_per_slot // 256) * 256), "--cache-ram", "0", *more]
        self.begin_s = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            while not self._is_ready():
                if self._process.poll() is not None or time.perf_counter() - self.begin_s > _READY_S:
                    self._log.seek(0)
                    sys.exit(f"{program} did not start: {self._log.read()[-600:]}")
                time.sleep(0.005)
        except BaseException:
            self._process.kill()
            raise
        self.ready_s = time.perf_counter() - self.begin_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def complete(self, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
        """Return what it answers, greedily and with exactly max_tokens tokens."""
        asked = {"prompt": prompt, "n_predict": max_tokens, "ignore_eos": True, "temperature": 0.0, "top_k": 1}
        status, answer = self.call("POST", "/completion", {**asked, "cache_prompt": False})
        if status != 200:
            raise RuntimeError(str(answer)[:300])
        return answer

    def complete_all(self, work: list[tuple[list[int], int]]) -> int:
        """Send (prompt, max_tokens) all at once; return the number of output tokens."""
        with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
            return sum(pool.map(lambda one: int(self.complete(*one)["tokens_predicted"]), work))

    def _is_ready(self) -> bool:
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")
        finally:
            connection.close()


def main() -> None:
    from common import measure, read_work

    program, model, path = sys.argv[1:]
    work = [(request["prompt_token_ids"], request["max_tokens"]) for request in read_work(path)]
    longest = max(len(prompt) + length for prompt, length in work) + 16
    with LlamaServer(program, model, len(work), longest) as server:
        server.complete(list(range(10, 40)), 8)
        measure("llama-server", read_work(path), lambda: server.complete_all(work))


if __name__ == "__main__":
    main()
