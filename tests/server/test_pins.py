"""Fields that keep a prefix in the cache: each API's become one pin of the request, in the name of its key."""

from typing import Any

import httpx
import msgspec
import pytest

from pagoda.base.server_config import ServerConfig
from pagoda.core.request import Pin, Request
from pagoda.server.dialects.messages.bodies import MessagesRequest, cache_ttl_s
from tests.server.in_process import EndingClient, served

TEXT = {"model": "m", "prompt": "Hello", "max_tokens": 1}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "chat_template": TEMPLATE}


def asked(path: str, *bodies: dict[str, Any], keys: tuple[str, ...] = ()) -> list[Pin | None]:
    """Return the pins of the requests that the engine gets.   keys: of the server; the n-th body is from the n-th."""
    seen: list[Request] = []

    class Client(EndingClient):
        def add_request(self, request: Request) -> None:
            seen.append(request)
            super().add_request(request)

    async def test(http: httpx.AsyncClient) -> None:
        for number, body in enumerate(bodies):
            headers = {"Authorization": f"Bearer {keys[number]}"} if keys else {}
            await http.post(path, json=body, headers=headers)

    served(test, ServerConfig(api_keys=keys), client=Client())
    assert len(seen) == len(bodies)
    return [request.pin for request in seen]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_the_key_and_the_retention_of_openai(path: str, body: dict[str, Any]) -> None:
    given: list[dict[str, Any]] = [
        {},
        {"prompt_cache_key": None, "prompt_cache_retention": None},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "in_memory"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    ]
    pins = asked(path, *(body | fields for fields in given))
    assert pins == [None, None, Pin(300), Pin(300), Pin(86_400)]


def test_keys_pin_in_shares_of_their_own_whatever_salt_they_give() -> None:
    kept = TEXT | {"prompt_cache_key": "k"}
    pins = asked("/v1/completions", kept, kept | {"cache_salt": "s"}, kept, keys=("one", "one", "two"))
    owners = [pin and pin.owner for pin in pins]
    assert owners[0] == owners[1]
    assert owners[0] != owners[2]
    assert all(owners)


def test_another_retention_is_refused_by_name() -> None:
    async def test(http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json=TEXT | {"prompt_cache_retention": "7d"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_cache_retention"

    served(test)


KEPT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
BLOCK = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"cache_control": None}, None),
        ({"cache_control": KEPT}, 300),
        ({"cache_control": KEPT, "system": [BLOCK | {"cache_control": LONG}]}, 3600),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": KEPT}]}, 300),
        ({"messages": [{"role": "user", "content": [BLOCK, BLOCK | {"cache_control": LONG}]}]}, 3600),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [BLOCK | {"cache_control": KEPT}]}
                        ],
                    }
                ]
            },
            300,
        ),
    ],
)
def test_the_longest_mark_of_anthropic(fields: dict[str, Any], seconds: int | None) -> None:
    plain = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    assert cache_ttl_s(msgspec.convert(plain | fields, MessagesRequest)) == seconds
