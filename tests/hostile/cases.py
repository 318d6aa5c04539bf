"""What a deployment meets: fields with values that they do not expect, sizes, text that is none, and bad HTTP.

Every case is the same bytes on every machine.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pagoda.server.app import ENDPOINTS
from pagoda.server.body import Body
from pagoda.server.dialects.ollama.bodies import OllamaOptions
from tests.server.turn_apis import BODIES, MODEL, Turn, asked

MB = 2**20


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes written as they are: `Raw(b"1e999")`, or a string whose bytes are not UTF-8."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A body to post.   title: what is wrong with it."""

    title: str
    path: str
    body: bytes


def write(value: Any) -> bytes:
    """Return the value as JSON text; lone surrogates are written as escapes."""
    match value:
        case Raw():
            return value.text
        case dict():
            return b"{" + b",".join(write(name) + b":" + write(one) for name, one in value.items()) + b"}"
        case list():
            return b"[" + b",".join(map(write, value)) + b"]"
        case _:
            return json.dumps(value).encode()


# ---- one field

_NUMBERS = [
    *(0, 1, -1, 1000, 2**31, 2**53 + 1, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0, 1e-320, 1.7e308),
    *map(Raw, (b"1e999", b"NaN", b"-Infinity", b"01", b"1.", b"9" * 400, b"0." + b"3" * 20_000, b"1e" + b"9" * 5_000)),
]
_STRINGS = [
    *("", " ", "a", "\x00", "\x1b[31m\x07", "\r\nX-Injected: 1", "\u202e\u2066", "\ufeff", "\uffff"),
    *("\ud800", "a\ud83d", "\ude00\ud83d", "ab" * 50 + "\udc80"),
    *("🏳️‍🌈" * 40, "e" + "\u0301" * 2_000, "\u200b" * 3_000, "İ", "ﬃ", "\u2028"),
    *("1", "-1", "NaN", "null", "true", "[1]", "../../../../etc/passwd", "%s%n%x", "{{7*7}}", "{0.__class__}"),
    *("<|im_start|>system\n", "<|endoftext|>", "</tool_call>", "<think>"),
    *("a" * 257, "ab" * 50_000, "\n" * 20_000, "9" * 20_000, "é" * 20_000, "".join(map(chr, range(0x4E00, 0x9C20)))),
    *map(Raw, (b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\x01"', b'"\\x41"', b'"\\u12"', b"'a'", b'"')),
]
_ARRAYS = [
    *([], [None], [[]], [{}], [True], [-1], ["\ud800"], [[0]], [[[0]]], [1, "a", None, {}, [], 0.5], [2**64], [1.5]),
    *([0] * 1_000, ["a"] * 1_000, [[0]] * 1_000, [{}] * 1_000, [[0], "a"], ["a" * 30_000]),
    *map(Raw, (b"[" * 300 + b"]" * 300, b"[" * 100_000 + b"]" * 100_000, b"[" * 100_000, b"[1,]", b"[,1]")),
    [{"type": "text", "text": "\ud800"}],
    [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}],
    [{"role": "tool", "content": "a", "tool_call_id": "\ud800"}],
]
_OBJECTS = [
    *({}, {"": ""}, {"\ud800": 1}, {"a": "\ud800"}, {"1": Raw(b"NaN")}, {"-1": 1}, {"1.5": 1}, {"a" * 30_000: 1}),
    *({str(i): 1 for i in range(1_000)}, {" 1": 1, "1": 2, "+1": 3, "1_0": 4}, {"type": "json_object"}),
    *map(Raw, (b'{"a":' * 100_000, b'{"a"}', b"{a:1}", b'{"a":1,}', b'{"a":1,"a":2}')),
    {"function": {"name": "\ud800"}, "type": "function"},
    {"messages": [1], "tools": 1, "add_generation_prompt": 1, "bos_token": "\ud800"},
]
HOSTILE: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_STRINGS, *_ARRAYS, *_OBJECTS)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
_OF_MESSAGES = (
    "messages.0 messages.0.role messages.0.content messages.0.content.0 messages.0.content.0.type "
    "messages.0.content.0.text messages.1"
)
_OF_CHATS = (
    f"{_OF_MESSAGES} messages.0.name messages.0.tool_calls messages.0.tool_calls.0.function.arguments "
    "messages.0.anything tools.0 tools.0.function tools.0.function.name tool_choice.function.name "
    "chat_template_kwargs.messages"
)
_OF_SAMPLING = (
    "logit_bias.5 stop.0 stream_options.include_usage stop_token_ids.0 bad_words.0 allowed_token_ids.0 "
    "response_format.type metadata.a"
)
_OF_ANTHROPICS = (
    f"{_OF_MESSAGES} messages.0.content.0.source.data messages.0.content.0.input messages.0.content.0.content "
    "system.0 system.0.text tools.0 tools.0.name tools.0.input_schema tool_choice.type tool_choice.name "
    "thinking.type thinking.budget_tokens output_config.format.schema"
)
_OF_RESPONSES = (
    "input.0 input.0.type input.0.role input.0.content input.0.content.0 input.0.content.0.type "
    "input.0.content.0.text input.0.arguments input.0.output input.0.call_id input.0.encrypted_content tools.0 "
    "tools.0.type tools.0.name tools.0.parameters tools.0.format tools.0.format.definition tools.0.tools "
    "tools.0.tools.0 tools.0.tools.0.name tool_choice.type tool_choice.name tool_choice.tools tool_choice.tools.0 "
    "input.0.summary input.0.name input.0.input text.format text.format.schema "
    "reasoning.effort include.0"
)
_OF_ITEMS = (
    "items.0 items.0.id items.0.type items.0.role items.0.content items.0.content.0 items.0.content.0.text "
    "items.0.summary items.0.output items.1"
)
_OF_OLLAMAS = " ".join(f"options.{name}" for name in (*OllamaOptions.__struct_fields__, "stop.0", "mirostat"))
_OF_OLLAMA_CHATS = (
    f"{_OF_MESSAGES} messages.0.thinking messages.0.images messages.0.images.0 messages.0.tool_calls "
    "messages.0.tool_calls.0.function messages.0.tool_calls.0.function.arguments messages.0.tool_name tools.0 "
    "tools.0.function tools.0.function.parameters format.properties"
)
_INNER: Mapping[str, tuple[dict[str, Any], str]] = {
    "ChatCompletionRequest": ({}, f"{_OF_CHATS} {_OF_SAMPLING}"),
    "BatchChatRequest": ({}, f"messages.0 messages.0.0 messages.0.0.content {_OF_SAMPLING}"),
    "CompletionRequest": ({}, f"prompt.0 prompt.0.0 {_OF_SAMPLING}"),
    "InfillRequest": (
        {"input_prefix": "Hi"},
        "input_extra.0 input_extra.0.text input_extra.0.filename stop.0 samplers.0",
    ),
    "BatchRequest": (
        {"input_file_id": "file-none", "endpoint": TEXT},
        "metadata.a output_expires_after.seconds output_expires_after.anchor",
    ),
    "MessagesRequest": ({}, f"{_OF_ANTHROPICS} stop_sequences.0"),
    "CountTokensRequest": ({"model": MODEL, **_HI}, _OF_ANTHROPICS),
    "ResponsesRequest": ({}, f"{_OF_RESPONSES} metadata.a conversation.id"),
    "ConversationRequest": ({"items": _HI["messages"]}, f"{_OF_ITEMS} metadata.a"),
    "ConversationUpdate": ({"metadata": None}, "metadata.a"),
    "ItemsRequest": ({"items": _HI["messages"]}, _OF_ITEMS),
    "OllamaChatRequest": ({}, f"{_OF_OLLAMAS} {_OF_OLLAMA_CHATS}"),
    "OllamaGenerateRequest": ({}, f"{_OF_OLLAMAS} images.0 format.properties"),
    "OllamaEmbedRequest": ({"input": "Hi"}, "input.0"),
    "OllamaEmbeddingsRequest": ({"prompt": "Hi"}, ""),
    "OllamaShowRequest": ({}, ""),
    "OllamaPullRequest": ({"model": "x"}, ""),
    "OllamaCopyRequest": ({"source": "x", "destination": "y"}, ""),
    "OllamaDeleteRequest": ({"model": "x"}, ""),
    "TokenizeRequest": ({"prompt": "Hi"}, _OF_CHATS),
    "DetokenizeRequest": ({"tokens": [1, 2, 3]}, "tokens.0"),
    "EmbeddingRequest": ({"input": "Hi"}, "input.0 input.0.0"),
    "PoolingRequest": ({"input": "Hi"}, "input.0 input.0.0"),
    "ClassificationRequest": ({"input": "Hi"}, "input.0 input.0.0"),
    "ScoreRequest": ({"text_1": "Hi", "text_2": ["a"]}, "text_1.0 text_2.0"),
    "RerankRequest": ({"query": "Hi", "documents": ["a"]}, "documents.0 documents.0.text"),
    "ModelRequest": ({"model": MODEL}, ""),
    "AbortRequest": ({"request_ids": ["a"]}, "request_ids.0"),
    "LoadAdapterRequest": ({"lora_name": "x", "lora_path": "x"}, ""),
    "UnloadAdapterRequest": ({"lora_name": "x"}, ""),
    "RestartRequest": ({"model": "x"}, ""),
}
"""By the name of a body: one that is accepted (of those in ASKS: from there), and places inside its fields."""
_SHORT = Turn("Hi", 3, seed=1)


def _route(path: str, kind: type[Body]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the path of a route, a body that it accepts, and the places in it where something else can stand.

    All fields that the body declares are among these.
    """
    good, inner = _INNER[kind.__name__]
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    places = dict.fromkeys([*fields, *kind.unserved, "no_such_field", *inner.split()])
    return path, asked(path, _SHORT) if path in BODIES else good, tuple(places)


METHODS = {one.path: one.method for one in ENDPOINTS if one.body is not None}
ROUTES = tuple(_route(one.path, one.body) for one in ENDPOINTS if one.body is not None and not one.is_form)
"""Every route that reads a JSON object, with a body that it accepts, and the places where something else can stand."""


GOOD = write(asked(TEXT, _SHORT))


def field_cases(seed: int, count: int) -> list[Case]:
    """Return `count` of all pairs of a place and a hostile value; the same for the same seed."""
    pairs = [(route, place, i) for route in ROUTES for place in route[2] for i in range(len(HOSTILE))]
    chosen = random.Random(seed).sample(pairs, count)
    return [
        Case(f"{place} = hostile value {i}", path, write(put(body, place, HOSTILE[i])))
        for (path, body, _), place, i in chosen
    ]


def put(body: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a copy of `body` with `value` at `place` ("messages.0.content"), making what is missing on the way."""
    copy = json.loads(json.dumps(body))
    parts = [int(part) if part.isdigit() and not place.startswith("logit_bias") else part for part in place.split(".")]
    here: Any = copy
    for part, following in itertools.pairwise(parts):
        wanted: Any = [] if isinstance(following, int) else {}
        inner = here.get(part) if isinstance(here, dict) else here[part] if part < len(here) else None
        inner = inner if isinstance(inner, type(wanted)) else wanted
        _set(here, part, inner)
        here = inner
    _set(here, parts[-1], value)
    return copy


def _set(here: Any, part: Any, value: Any) -> None:
    if isinstance(here, list):
        here += [0] * (part + 1 - len(here))
    here[part] = value


# ---- sizes, and what is not JSON


def size_cases() -> Iterator[Case]:
    """Yield bodies with very many entries, very long strings, and deep nesting."""
    user = b'{"messages":[{"role":"user","content":"x"}],'

    def entries(before: bytes, entry: bytes, after: bytes, size: int) -> bytes:
        return before + b",".join([entry] * (size // (len(entry) + 1))) + after

    for entry in (b"1", b"-1", b"1e999", b'"a"', b"[]", b"[1]", b"{}"):
        yield Case("prompts", TEXT, entries(b'{"prompt":[', entry, b"]}", 2 * MB))
        yield Case("tokens", "/detokenize", entries(b'{"tokens":[', entry, b"]}", 2 * MB))
        yield Case("metadata", CHAT, entries(user + b'"metadata":{"a":[', entry, b"]}}", 6 * MB))
    for name in (b"stop", b"bad_words", b"stop_token_ids", b"allowed_token_ids"):
        for entry in (b'"a"', b"7"):
            yield Case(f"{name.decode()}", TEXT, entries(b'{"prompt":"x","' + name + b'":[', entry, b"]}", MB))
    yield Case("messages", CHAT, entries(b'{"messages":[', b'{"role":"user","content":"x"}', b"]}", 4 * MB))
    yield Case("tools", CHAT, entries(user + b'"tools":[', b'{"function":{"name":"f"}}', b"]}", MB))
    yield Case("keys", CHAT, user + b'"metadata":{' + b",".join(b'"k%d":1' % i for i in range(10**6)) + b"}}")
    yield Case("biases", TEXT, b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(10**5)) + b"}}")
    for text in (b"a", b" ", b"\\n", b"\\u0000", "漢".encode(), b"<|im_start|>", b"\\ud800", b"don't've'll "):
        yield Case(f"a long text of {text!r}", TEXT, b'{"prompt":"' + text * (12 * MB // len(text)) + b'"}')
        yield Case(f"text of {text!r} to cut", "/tokenize", b'{"prompt":"' + text * (300_000 // len(text)) + b'"}')
    for name in (b"model", b"user", b"request_id", b"no_such_field", b"chat_template"):
        yield Case(f"a long {name.decode()}", CHAT, user + b'"' + name + b'":"' + b"a" * MB + b'"}')
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        inner = opening * 10**6 + b"1" + closing * 10**6
        yield Case("nesting", CHAT, user + b'"metadata":{"a":' + inner + b"}}")
        yield Case("nesting of nothing", TEXT, inner)
    yield Case("too large", TEXT, b'{"prompt":"' + b"a" * 17 * MB + b'"}')


def broken_cases() -> Iterator[Case]:
    """Yield bodies that are not a JSON object."""
    for cut in range(0, len(GOOD), 5):
        yield Case(f"the first {cut} bytes", TEXT, GOOD[:cut])
    for text in (
        b"null",
        b"1",
        b'"a"',
        b"[]",
        b"{}{}",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf" + GOOD,
        GOOD + b"x",
        b"{" * 1_000,
    ):
        yield Case(f"{text[:20]!r}", TEXT, text)
    for text in (GOOD.decode().encode("utf-16"), GOOD.replace(b":", b"="), b"a=1&b=2", b"\x00" * 1_000, b"--x\r\n\r\n"):
        yield Case(f"{text[:20]!r}", CHAT, text)


# ---- HTTP


def request(path: str = TEXT, body: bytes = GOOD, *headers: bytes, method: str = "POST") -> bytes:
    """Return one complete HTTP/1.1 request."""
    lines = [
        f"{method} {path} HTTP/1.1".encode("latin-1", "replace"),
        b"Host: pagoda",
        b"Authorization: Bearer attacker",
    ]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def http_cases() -> Iterator[tuple[str, bytes]]:
    """Yield (title, bytes) of requests that are good or bad HTTP, each for a connection of its own."""
    for header in (
        *(b"X-Request-Id: " + one for one in (b"", b"a" * 129, b"\xed\xa0\x80", b"a b", b"../../a", b"\xff" * 50)),
        *(b"Authorization: " + one for one in (b"", b"Basic YTpi", b"Bearer \xff", b"Bearer " + b"a" * 60_000)),
        *(b"Content-Encoding: gzip", b"Expect: 100-continue", b"Connection: upgrade\r\nUpgrade: websocket"),
        *(b"Connection: upgrade\r\nUpgrade: h2c", b"Host: b", b"Content-Length: 5", b"Origin: \xff", b"X : a", b": a"),
        *(b"X: " + b"a" * 70_000, b"\r\n".join(b"X-%d: a" % i for i in range(8_000)), b"X", b"X:\x00a", b" folded"),
        *(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked", b"Content-Type: application/json; charset=x"),
    ):
        yield f"the header {header[:30]!r}", request(TEXT, GOOD, header)
    for method in ("GET", "HEAD", "PUT", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "post", "A" * 9_000):
        yield f"the method {method[:20]}", request(TEXT, b"", method=method)
    for path in (
        *(
            "/",
            "//",
            "/v1/completions/",
            "/v1/../v1/completions",
            "/v1/models/%ed%a0%80",
            "/v1/models/../../etc/passwd",
        ),
        *(
            "/v1/models/" + "a" * 9_000,
            "/v1/completions?" + "a=1&" * 3_000,
            "*",
            "http://a.example/",
            "/%00",
            "/%ff%fe",
        ),
        *("/reset_prefix_cache?reset_running_requests=a", "/metrics?name[]=" + "a" * 5_000, "/\xff"),
    ):
        yield f"the path {path[:30]!r}", request(path)
    head = request(TEXT, b"", b"Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    for body in (
        *(
            b"zz\r\nabc\r\n",
            b"-1\r\na\r\n",
            b"3\r\nabcdef\r\n",
            b"\r\n\r\n",
            b"ffffffffffffffffff\r\na\r\n",
            b"0\r\n\r\n",
        ),
        *(b"3;" + b"a" * 70_000 + b"\r\nabc\r\n", b"1\r\n{\r\n" * 3_000 + b"0\r\n\r\n", b"0\r\nX: " + b"a" * 70_000),
    ):
        yield f"the chunk {body[:20]!r}", head + body
    for bytes_ in (b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 500, b"GET\r\n\r\n"):
        yield f"the bytes {bytes_[:20]!r}", bytes_
        yield f"a request, then the bytes {bytes_[:20]!r}", request() + bytes_
    yield "forty requests at once", request() * 40
