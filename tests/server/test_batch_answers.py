"""`pagoda run-batch` answers what a server answers to the same bodies."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.server.live import FAKE_FLAGS, LiveServer

MESSAGES = [{"role": "user", "content": "Name a colour."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, "seed": 1, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30, "seed": 2, "tools": [TOOL], "unknown": 1}),
    ("/v1/chat/completions", {"messages": [], "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "seed": 3, "chat_template": "{{ messages }}"}),
    ("/v1/completions", {"prompt": ["é", [1, 2, 3]], "max_tokens": 9, "seed": 4, "echo": True, "stop": "a"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}),
    ("/v1/completions", {"prompt": "x", "model": "none"}),
    ("/v1/completions", {"prompt": 5}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 16, "seed": 5, "store": False}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}),
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "x", "documents": ["y", "z"]}),
    ("/score", {"text_1": "x", "text_2": ["y"]}),
    ("/v1/completions", []),
    ("/v1/completions", "a string"),
]
_OF_A_REQUEST = re.compile(r'"(?:id|created|created_at|completed_at)": [^,}]*')


def comparable(body: Any) -> str:
    """Return a body without ids and times, and without what depends on the prefix cache."""
    return re.sub(r'"cached_tokens": \d+|"cache_write_tokens": \d+', "", _OF_A_REQUEST.sub("", json.dumps(body)))


def test_answers_are_those_of_a_server(fake_server: LiveServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(ASKED)
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = (sys.executable, "-m", "pagoda", "run-batch", str(source), str(target), "--trust-request-chat-template")
    flags = [flag for flag in FAKE_FLAGS if flag != "--trust-request-chat-template"]
    subprocess.run((*command, *flags), check=False, timeout=300)
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert {line["response"]["status_code"] for line in answers.values()} == {200, 400, 404}
    for number, (url, body) in enumerate(ASKED):
        line = answers[str(number)]
        assert line["error"] is None
        status, expected = fake_server.post(url, body)
        assert line["response"]["status_code"] == status, (url, body)
        assert comparable(line["response"]["body"]) == comparable(expected), (url, body)
