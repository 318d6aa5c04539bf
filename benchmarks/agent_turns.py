#!/usr/bin/env python3
"""How much of each prompt of a coding agent is cached: 40 turns, 30 tools, with the history store, without, llama.cpp.

usage: agent_turns.py MODEL.gguf [--llama-server PROGRAM] [--turns 40]

The replies are forced by a grammar, so that all say the same; MODEL is one of make_random_gguf.py (shape
`thin`). A client sends them back as most do: arguments as JSON of its own, texts without white space at their ends.
What is counted is tokens, no time: those of the prompts, those that were cached, and those computed again although the
turn before had computed or sampled them.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

TEMPLATE = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

{{ messages[0].content }}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|eot_id|>{% for m in messages[1:] %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>\
assistant<|end_header_id|>

{% endif %}"""
WORDS = [
    "the",
    "file",
    "test",
    "of",
    "parse",
    "a",
    "list",
    "reads",
    "returns",
    "when",
    "error",
    "path",
    "value",
    "import",
]
NAMES = ("read", "write", "edit", "search", "list", "run")
SYSTEM = "You are a coding agent. Use the tools, one step at a time, until the tests pass."


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def tools() -> list[dict[str, Any]]:
    rng = random.Random(1)
    made: list[dict[str, Any]] = []
    for number in range(30):
        properties = {name: {"type": "string", "description": text(rng, 8)} for name in ("path", "content", "reason")}
        parameters = {"type": "object", "properties": properties, "required": ["path"]}
        name = f"{NAMES[number % len(NAMES)]}_{number}"
        made.append(
            {"type": "function", "function": {"name": name, "description": text(rng, 20), "parameters": parameters}}
        )
    return made


@dataclass(frozen=True)
class Reply:
    """What the model says, and the message that a client makes of it."""

    text: str
    message: dict[str, Any]


def reply(rng: random.Random, turn: int) -> Reply:
    """Every fifth reply is a text, every third writes a file."""
    said = text(rng, rng.randint(5, 20)).capitalize() + "."
    if turn % 5 == 4:
        return Reply(said + "\n", {"role": "assistant", "content": said})
    arguments = {"path": f"src/{rng.choice(WORDS)}.py", "content": text(rng, 150 if turn % 3 == 0 else 10)}
    name = f"{rng.choice(NAMES)}_{rng.randrange(5)}"
    call = json.dumps({"name": name, "arguments": arguments}, separators=(", ", ": "))
    sent = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
    function = {"name": name, "arguments": sent}
    message = {"role": "assistant", "content": said}
    message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    return Reply(f"{said}\n<tool_call>\n{call}\n</tool_call>", message)


@dataclass
class Counts:
    """Tokens of each turn."""

    prompts: list[int] = field(default_factory=list[int])
    cached: list[int] = field(default_factory=list[int])
    again: list[int] = field(default_factory=list[int])

    def add(self, prompt: int, cached: int, before: int) -> None:
        """before: tokens of the turn before, its answer included."""
        self.prompts.append(prompt)
        self.cached.append(cached)
        self.again.append(max(0, min(before, prompt) - cached))


Ask = Callable[[list[dict[str, Any]], str], tuple[int, int, int]]
"""From messages and the reply to the tokens of the prompt, of which cached, and of the answer."""


def converse(ask: Ask, num_turns: int) -> Counts:
    rng, counts, before = random.Random(0), Counts(), 0
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text(rng, 60)}]
    for turn in range(num_turns):
        said = reply(rng, turn)
        prompt, cached, sampled = ask(messages, said.text)
        counts.add(prompt, cached, before)
        before = prompt + sampled
        messages.append(said.message)
        if calls := said.message.get("tool_calls"):
            messages.append(
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": text(rng, rng.randint(20, 120))}
            )
        else:
            messages.append({"role": "user", "content": text(rng, 20)})
    return counts


def post(url: str, body: object) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        sys.exit(f"{url}: {error.code} {error.read()[:500]!r}")


@contextlib.contextmanager
def pagoda(model: str, template: Path, history: str) -> Generator[str]:
    """Serve a model; yield the server's URL."""
    port = random.randint(20_000, 60_000)
    flags = ["--chat-template", str(template), "--history", history, "--port", str(port), "--no-access-log"]
    flags += [
        "--max-model-len",
        "65536",
        "--max-num-seqs",
        "1",
        "--kv-cache-memory",
        "512MiB",
        "--tool-call-parser",
        "hermes",
    ]
    server = subprocess.Popen([sys.executable, "-m", "pagoda", "serve", "--model", model, *flags])
    try:
        while True:
            if server.poll() is not None:
                sys.exit("the server did not start")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def of_pagoda(model: str, template: Path, history: str, num_turns: int) -> Counts:
    with pagoda(model, template, history) as url:

        def ask(messages: list[dict[str, Any]], said: str) -> tuple[int, int, int]:
            body = {
                "messages": messages,
                "tools": tools(),
                "structured_outputs": {"choice": [said]},
                "max_tokens": 8000,
            }
            answer = post(f"{url}/v1/chat/completions", body)
            content = answer["choices"][0]["message"]["content"]
            assert content == said, (content, said)
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return usage["prompt_tokens"], cached, usage["completion_tokens"]

        return converse(ask, num_turns)


def of_llama_server(program: str, model: str, template: Path, num_turns: int) -> Counts:
    """Its grammars take half a second per token of this vocabulary, so what it would sample is evaluated instead.

    To its cache that is the same: the prompt's tokens, then those of the reply, in pieces of random length.
    """
    from llama_server import LlamaServer

    rng = random.Random(2)
    more = ("--jinja", "--chat-template-file", str(template))
    with LlamaServer(program, model, tokens_per_slot=65_536, more=more) as server:

        def tokens(text: str, parse_special: bool = False) -> list[int]:
            asked = {"content": text, "add_special": False, "parse_special": parse_special}
            return server.call("POST", "/tokenize", asked)[1]["tokens"]

        def evaluate(ids: list[int]) -> tuple[int, int]:
            asked = {"prompt": ids, "n_predict": 1, "cache_prompt": True}
            timings = server.call("POST", "/completion", asked)[1]["timings"]
            return timings["cache_n"] + timings["prompt_n"], timings["cache_n"]

        def ask(messages: list[dict[str, Any]], said: str) -> tuple[int, int, int]:
            prompt = server.call("POST", "/apply-template", {"messages": messages, "tools": tools()})[1]["prompt"]
            ids = tokens(prompt, parse_special=True)
            counted = evaluate(ids)
            sampled: list[int] = []
            while said:
                size = rng.randint(1, 8)
                sampled += tokens(said[:size])
                said = said[size:]
            evaluate([*ids, *sampled])
            return *counted, len(sampled)

        return converse(ask, num_turns)


def show(name: str, counts: Counts) -> None:
    shares = [cached / prompt for prompt, cached in zip(counts.prompts, counts.cached, strict=True)]
    later = sorted(shares[1:])
    computed = sum(counts.prompts[1:]) - sum(counts.cached[1:])
    cells = (f"{counts.prompts[-1]:,}", f"{later[0]:.1%}", f"{later[len(later) // 2]:.1%}", f"{computed:,}")
    print(f"| {name} | {' | '.join(cells)} | {sum(counts.again):,} |", flush=True)
    print(f"{name}, by turn: {' '.join(f'{share:.1%}' for share in shares)}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--llama-server")
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    print("| | last prompt | cached, worst turn | median | computed after the first turn | of that, again |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        if args.llama_server is not None:
            show("llama.cpp", of_llama_server(args.llama_server, args.model, template, args.turns))
        for history in ("memory", "off"):
            show(f"pagoda, `--history {history}`", of_pagoda(args.model, template, history, args.turns))


if __name__ == "__main__":
    main()
