"""The anthropic package against a server with scripted answers: `anthropic_client.py URL` prints what it saw as JSON.

Runs in the environment of the clients (requirements-clients.txt). A request with `seed` in its extra body gets the
answer of that number.
"""

import json
import sys
from typing import Any

import anthropic

MODEL = "smollm2-135m"
KEPT = {"type": "ephemeral", "ttl": "1h"}
TOOLS: list[Any] = [
    {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}, "cache_control": KEPT},
    {"type": "web_search_20250305", "name": "web_search"},
]
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "Weather in Zürich?"}],
    "tools": TOOLS,
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def shown(message: Any) -> dict[str, Any]:
    """A message without ids, which differ from answer to answer."""
    blocks = [{name: value for name, value in block.to_dict().items() if name != "id"} for block in message.content]
    return {
        "content": blocks,
        "stop": [message.stop_reason, message.stop_sequence],
        "output": message.usage.output_tokens,
    }


def both(client: anthropic.Anthropic, seed: int, **more: Any) -> list[dict[str, Any]]:
    """The answer of a script, whole and streamed."""
    asked = {**ASK, **more, "extra_body": {"seed": seed}}
    with client.messages.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_message()
    return [shown(client.messages.create(**asked)), shown(streamed)]


def agent(client: anthropic.Anthropic) -> list[Any]:
    """A turn with two calls, and the next turn with their results."""
    first = client.messages.create(**ASK, thinking=THINKING, extra_body={"seed": 0})
    calls = [block for block in first.content if block.type == "tool_use"]
    said = [{"type": "text", "text": "rain"}]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": said} for call in calls]
    turns: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.beta.messages.create(**{**ASK, "messages": turns}, betas=["x-2026-01-01"], extra_body={"seed": 3})
    return [len(calls), shown(second), second.usage.cache_read_input_tokens]


def errors(client: anthropic.Anthropic) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    strict = {"name": "f", "strict": True, "input_schema": {"properties": {"a": {"uniqueItems": True}}}}
    asked: dict[str, dict[str, Any]] = {
        "model": {"model": "other"},
        "temperature": {"extra_body": {"temperature": -3.0}},
        "stop": {"stop_sequences": ["x"] * 100},
        "block": {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        "image": {"messages": [{"role": "user", "content": [image]}]},
        "schema": {"tools": [TOOLS[1], strict]},
    }
    for name, more in asked.items():
        try:
            client.messages.create(**{**ASK, **more})
        except anthropic.APIStatusError as error:
            body: Any = error.body
            seen[name] = [error.status_code, body["type"], body["error"]["type"], body["error"]["message"]]
    return seen


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    count = client.messages.count_tokens(model=MODEL, messages=ASK["messages"])
    whole = client.messages.create(**{**ASK, "tools": []}, extra_body={"seed": 3})
    usage = whole.usage
    print(
        json.dumps(
            {
                "calls": both(client, 0),
                "thought": both(client, 2, thinking=THINKING),
                "hidden": both(client, 2),
                "text": both(client, 3),
                "cut": both(client, 3, max_tokens=4),
                "stopped": both(client, 3, stop_sequences=["needed"]),
                "forced": both(client, 0, tool_choice={"type": "tool", "name": "weather"}, max_tokens=300),
                "one": both(client, 0, tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
                "agent": agent(client),
                "errors": errors(client),
                "counted": [count.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0)],
                "models": [one.id for one in client.models.list()],
                "model": client.models.retrieve(MODEL).display_name,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
