"""The ollama package against a server: `ollama_client.py URL all|forms` prints what it saw as JSON.

Runs in the environment of the clients (requirements-clients.txt). For `all`, the server has
scripted answers: a request with the option `seed` gets the answer of that number.
"""

import functools
import json
import operator
import sys
from typing import Any

import ollama

MODEL = "smollm2-135m"


def weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: Where.
    """
    return f"rain in {city}"


ASK: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Zürich?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BRIEF = {"num_predict": 120, "temperature": 0}
COUNTS = ("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration", "total_duration", "load_duration")


def shown(message: Any) -> dict[str, Any]:
    calls = [[call.function.name, dict(call.function.arguments)] for call in message.tool_calls or ()]
    return {"content": message.content or "", "thinking": message.thinking or "", "calls": calls}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: functools.reduce(operator.add, (part[name] for part in parts)) for name in parts[0]}


def both(client: ollama.Client, seed: int, num_predict: int = 300, **more: Any) -> list[dict[str, Any]]:
    """The answer of a script, whole and streamed."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [weather], **more}
    asked["options"] = {"seed": seed, "num_predict": num_predict, **more.get("options", {})}
    whole = client.chat(**asked)
    lines = list(client.chat(**asked, stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    streamed = merged([shown(line.message) for line in lines])
    ends = [{"done": one.done_reason, "tokens": one.eval_count} for one in (whole, lines[-1])]
    return [{**shown(whole.message), **ends[0]}, {**streamed, **ends[1]}]


def agent(client: ollama.Client) -> list[Any]:
    """A turn with two calls, and the next turn with their results."""
    first = client.chat(model=MODEL, messages=ASK, tools=[weather], options={"seed": 0})
    calls = first.message.tool_calls or []
    results = [
        {"role": "tool", "tool_name": call.function.name, "content": weather(call.function.arguments["city"])}
        for call in calls
    ]
    second = client.chat(model=MODEL, messages=[*ASK, first.message, *results], tools=[weather], options={"seed": 3})
    return [len(calls), second.message.content]


def texts(client: ollama.Client) -> dict[str, Any]:
    options = {"seed": 3}
    whole = client.generate(MODEL, "Hi", system="Be brief.", options=options, keep_alive="5m")
    lines = list(client.generate(MODEL, "Hi", options=options, stream=True))
    raw = client.generate(MODEL, "Hi", raw=True, options=options)
    loaded, unloaded = client.generate(MODEL), client.chat(MODEL, [], keep_alive=0)
    return {
        "whole": whole.response,
        "streamed": "".join(line.response for line in lines),
        "num_lines": len(lines),
        "raw": [raw.response, whole.prompt_eval_count > raw.prompt_eval_count],
        "loaded": [loaded.done_reason, loaded.response, unloaded.done_reason],
        "counts": [getattr(one, name) for name in COUNTS for one in (whole, lines[-1])],
    }


def errors(client: ollama.Client) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    asked: dict[str, dict[str, Any]] = {
        "model": {"model": "other"},
        "temperature": {"options": {"temperature": -3.0}},
        "num_predict": {"options": {"num_predict": 10**6}},
        "mirostat": {"options": {"mirostat": 2}},
        "long": {"messages": [{"role": "user", "content": "word " * 3000}]},
        "image": {"messages": [{"role": "user", "content": "?", "images": [b"x"]}]},
        "tool": {"tools": [{"type": "function", "function": {}}]},
        "format": {"format": {"type": "object", "properties": {"a": {"uniqueItems": True}}}},
    }
    for name, more in asked.items():
        for stream in (False, True):
            try:
                list(client.chat(**{"model": MODEL, "messages": ASK, "stream": stream, **more}))
            except ollama.ResponseError as error:
                seen.setdefault(name, []).append([error.status_code, error.error])
    for name, more in {"suffix": {"suffix": "x"}, "template": {"template": "x"}}.items():
        try:
            client.generate(MODEL, "Hi", **more)
        except ollama.ResponseError as error:
            seen[name] = [[error.status_code, error.error]]
    try:
        client.pull("llama9")
    except ollama.ResponseError as error:
        seen["pull"] = [[error.status_code, error.error]]
    return seen


def embeddings(client: ollama.Client) -> dict[str, Any]:
    two = client.embed(MODEL, ["one", "two"], dimensions=8)
    one = client.embed(MODEL, "one", dimensions=8)
    older = client.embeddings(MODEL, "one")
    long = "word " * 3000
    cut = client.embed(MODEL, long, truncate=True)
    try:
        client.embed(MODEL, long)
    except ollama.ResponseError as error:
        refused = [error.status_code, error.error]
    return {
        "same": [list(two.embeddings[0]) == list(one.embeddings[0]), len(two.embeddings), len(one.embeddings[0])],
        "length": sum(number**2 for number in one.embeddings[0]),
        "older": len(older.embedding),
        "counts": [two.prompt_eval_count, cut.prompt_eval_count],
        "refused": refused,
    }


def names(client: ollama.Client) -> dict[str, Any]:
    """Another name of the model, and what is pulled already."""
    seen: dict[str, Any] = {
        "pulled": [client.pull(MODEL).status, [one.status for one in client.pull(MODEL, stream=True)]]
    }
    seen["copied"] = [client.copy(MODEL, "gpt-oss").status, [one.model for one in client.list().models]]
    seen["answered"] = client.chat("gpt-oss", ASK, options={"seed": 3}).message.content
    seen["deleted"] = [client.delete("gpt-oss").status, [one.model for one in client.list().models]]
    for name in ("gpt-oss", MODEL):
        try:
            client.delete(name)
        except ollama.ResponseError as error:
            seen.setdefault("refused", []).append(error.status_code)
    return seen


def forms(client: ollama.Client) -> list[str]:
    """Answers of a form."""
    forms: list[Any] = ["json", SCHEMA]
    return [
        part
        for form in forms
        for part in (
            client.chat(MODEL, ASK, format=form, options=BRIEF).message.content or "",
            "".join(one.response for one in client.generate(MODEL, "Hi", format=form, options=BRIEF, stream=True)),
        )
    ]


def main(url: str, asks: str) -> None:
    client = ollama.Client(host=url)
    print(json.dumps(forms(client) if asks == "forms" else everything(client)))


def everything(client: ollama.Client) -> dict[str, Any]:
    shown_model = client.show(MODEL)
    (listed,), (running,) = client.list().models, client.ps().models
    return {
        "calls": both(client, 0),
        "thought": both(client, 2),
        "hidden": both(client, 2, think=False),
        "text": both(client, 3, model=f"{MODEL}:latest"),
        "cut": both(client, 3, num_predict=4),
        "cut_call": both(client, 0, num_predict=25),
        "stopped": both(client, 3, options={"stop": ["needed"]}),
        "agent": agent(client),
        "texts": texts(client),
        "errors": errors(client),
        "embeddings": embeddings(client),
        "names": names(client),
        "show": [shown_model.capabilities, shown_model.modelinfo, shown_model.template],
        "list": [listed.model, listed.size, listed.details.parameter_size, listed.details.family],
        "ps": [running.name, running.context_length, running.expires_at.year > 2100],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
