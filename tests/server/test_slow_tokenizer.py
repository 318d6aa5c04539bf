"""A tokenizer whose regular expression takes for ever on some texts: they are 400, other requests and SIGTERM go on."""

import contextlib
import http.client
import json
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from tests.cached_models import cached_model
from tests.engine.tokenizers.test_bounded_encoder import CATASTROPHIC, SLOW
from tests.server.live import FAKE_FLAGS, LiveServer, children, serving
from tests.server.stall_watch import StallReader, watched_serving

TIMEOUT_S = 0.5
SHORT = SLOW[:4_000]  # several seconds
MESSAGE = {"role": "user", "content": "Hi"}


def write_tokenizer(folder: Path) -> str:
    """The default model's tokenizer with a catastrophic pattern, which the trial at load does not meet."""
    path = folder / "tokenizer.json"
    load_tokenizer(cached_model("smollm2-135m")).backend.save(str(path))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    described = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": CATASTROPHIC}, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_only]}
    path.write_text(json.dumps(described))
    return str(folder)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, StallReader]]:
    folder: Path = tmp_path_factory.mktemp("slow")
    flags = ("--tokenizer", write_tokenizer(folder), "--server-timeouts.tokenizer-timeout-s", str(TIMEOUT_S))
    with watched_serving(folder, *FAKE_FLAGS, *flags) as both:
        yield both


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a short prompt": ("/v1/completions", {"prompt": SHORT}, "prompt"),
    "a long prompt": ("/v1/completions", {"prompt": SLOW, "truncate_prompt_tokens": 5}, "prompt"),
    "one of several prompts": ("/v1/completions", {"prompt": ["Hi", SHORT]}, "prompt"),
    "bad words": ("/v1/completions", {"prompt": "Hi", "bad_words": [SHORT]}, "bad_words"),
    "a message": ("/v1/chat/completions", {"messages": [{**MESSAGE, "content": SHORT}]}, "messages"),
    "a text to tokenize": ("/tokenize", {"prompt": SHORT}, "prompt"),
    "a message to tokenize": ("/tokenize", {"messages": [{**MESSAGE, "content": SLOW}]}, "messages"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_that_takes_too_long_is_refused(watched: tuple[LiveServer, StallReader], name: str) -> None:
    server, stalls = watched
    path, body, param = CASES[name]

    def ask() -> None:
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert "the tokenizer was stopped after 0.5 s" in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 300

    assert stalls.least_cpu_s(ask, 0.25) < 0.25


def test_others_are_served_and_sigterm_works_while_texts_are_tokenised(tmp_path: Path) -> None:
    flags = ("--tokenizer", write_tokenizer(tmp_path), "--server-timeouts.tokenizer-timeout-s", "600")
    with serving(tmp_path, *FAKE_FLAGS, *flags, "--server-timeouts.drain-timeout-s", "1") as server:
        connections = [http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60) for _ in range(3)]
        for text, connection in zip((SLOW[:60_000], SLOW, SLOW), connections, strict=True):
            body = json.dumps({"prompt": text})
            connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        pid = server.process.pid
        while len(encoders(pid)) < 3:  # they are at work, or start
            time.sleep(0.01)
        for path, body in (
            ("/v1/completions", {"prompt": "Hi there", "max_tokens": 3}),
            ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 3}),
        ):
            assert server.post(path, body)[0] == 200
        slow = [connection.sock for connection in connections[1:]]
        assert select.select(slow, [], [], 0)[0] == [], "they are not answered yet"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert {connection.getresponse().status for connection in connections} <= {503, 400}
        assert "Traceback" not in server.log.read_text()


CLIENTS_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: CASES[name][:2] for name in ("a short prompt", "one of several prompts", "bad words", "a message")
}


def test_the_text_of_a_client_that_has_gone_is_not_tokenised_any_longer(tmp_path: Path) -> None:
    flags = ("--tokenizer", write_tokenizer(tmp_path), "--server-timeouts.tokenizer-timeout-s", "600")
    with serving(tmp_path, *FAKE_FLAGS, *flags) as server:
        pid = server.process.pid
        for path, body in (*CLIENTS_TEXTS.values(), ("/tokenize", {"prompt": SLOW})):
            assert server.post("/tokenize", {"prompt": "Hi there"})[0] == 200
            before = {one: cpu_time(one) for one in encoders(pid)}
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            while not (busy := [one for one in encoders(pid) if cpu_time(one) > before.get(one, 0) + 20]):
                time.sleep(0.01)
            connection.close()
            end_s = time.monotonic() + 30
            while set(busy) & set(encoders(pid)):
                assert time.monotonic() < end_s, path
                time.sleep(0.01)
        assert server.post("/tokenize", {"prompt": "Hi there"})[0] == 200
        assert "Traceback" not in server.log.read_text()


def cpu_time(pid: int) -> int:
    """A process's CPU time, in ticks of 10 ms; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def encoders(pid: int) -> list[int]:
    """The processes of a server that encode texts."""
    return [child for child, command in children(pid).items() if b"encoder_worker" in command]
