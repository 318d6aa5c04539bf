"""Errors of the openai package, one function each: `openai3_clients.py NAME URL` prints what it saw as JSON.

Runs in the environment of the clients (requirements-clients.txt).
"""

import json
import sys
from collections.abc import Callable
from typing import Any

MODEL = "smollm2-135m"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SETTINGS: dict[str, Any] = {"max_tokens": 8, "seed": 5}


def openai_package(url: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **SETTINGS)
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **SETTINGS))
    seen: dict[str, Any] = {
        "version": openai.__version__,
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    }
    for name, options in {"temperature": {"temperature": -3}, "model": {"model": "other"}}.items():
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **options})
        except openai.APIStatusError as error:
            seen[name] = [error.status_code, error.param]
    return seen


def openai_retries(url: str) -> dict[str, Any]:
    """How often a client that retries by itself sends what this server cannot do yet."""
    import httpx2
    import openai

    sent: list[str] = []
    transport = httpx2.HTTPTransport()

    class Counting(httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            sent.append(request.url.path)
            return transport.handle_request(request)

    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=2, http_client=httpx2.Client(transport=Counting())
    )
    seen: dict[str, Any] = {}
    shape: Any = {"type": "json_object"}
    calls: dict[str, Callable[[], Any]] = {
        "embeddings": lambda: client.embeddings.create(model=MODEL, input="Hi"),
        "response_format": lambda: client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=shape, max_tokens=4
        ),
        "responses": lambda: client.responses.create(model=MODEL, input="Hi", max_output_tokens=4),
        "fine_tuning": lambda: client.fine_tuning.jobs.list(),
    }
    for name, call in calls.items():
        sent.clear()
        try:
            call()
            status = 200
        except openai.APIStatusError as error:
            status = error.status_code
        seen[name] = {"status": status, "sent": len(sent)}
    return seen


if __name__ == "__main__":
    clients = (openai_package, openai_retries)
    print(json.dumps({client.__name__: client for client in clients}[sys.argv[1]](sys.argv[2])))
