"""Hostile bodies: single fields, floods, long strings, nesting, and what is not JSON."""

import json
import random
from collections.abc import Callable
from typing import Any

from tests.hostile.json_text import Deep, Flood, FloodOfKeys, Pairs, Raw, write
from tests.hostile.routes import PLANNED, ROUTES, Route, put
from tests.hostile.values import HOSTILE

MAX_BODY_BYTES = 16 * 2**20

CHAT, TEXT, TOKENIZE, DETOKENIZE, ABORT = ROUTES[:5]

# (path, body, what is hostile about it)
Body = tuple[str, bytes, str]

SINGLE_FIELDS: tuple[tuple[Route, str, int], ...] = tuple(
    (route, place, i) for route in ROUTES for place in route.places for i in range(len(HOSTILE))
)
"""Every place of every route with every hostile value, by its index."""


def single_field(number: int) -> Body:
    """The request of SINGLE_FIELDS[number]."""
    route, place, value = SINGLE_FIELDS[number]
    body = write(put(route.body, place, HOSTILE[value]))
    return route.path, body, f"{place} = hostile value {value}"


def several_fields(draw: random.Random) -> Body:
    """Two to six places of one route at once; sometimes a name twice, sometimes on a route still to come."""
    kind = draw.random()
    route = draw.choice(ROUTES[:3] if kind < 0.7 else ROUTES[3:] if kind < 0.92 else PLANNED)
    places = draw.sample(route.places, min(len(route.places), draw.randint(2, 6)))
    body: Any = route.body
    for place in places:
        body = put(body, place, draw.choice(HOSTILE))
    if draw.random() < 0.2:
        items = list(body.items())
        body = Pairs(tuple(items + draw.sample(items, 1)))
    return route.path, write(body), ", ".join(places)


def tree(draw: random.Random) -> Body:
    """A random tree of hostile values as the body, or in a place of one."""
    value = _tree(draw, draw.randint(1, 5))
    route = draw.choice((*ROUTES, *PLANNED))
    if draw.random() < 0.3:
        return route.path, write(value), "a random tree"
    place = draw.choice(route.places)
    return route.path, write(put(route.body, place, value)), f"{place} = a random tree"


def _tree(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return draw.choice(HOSTILE)
    if kind < 0.65:
        return [_tree(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    names = ("role", "content", "type", "text", "function", "name", "a", "", "\ud800", "messages", "prompt")
    return Pairs(tuple((draw.choice(names), _tree(draw, depth - 1)) for _ in range(draw.randint(0, 4))))


# ---- sizes up to the limits

# An entry, how it is written, and where a flood of it goes: {} in an entry is its number.
_FLOODS: tuple[tuple[Route, str, Any], ...] = (
    *((ABORT, "request_ids", entry) for entry in ("cmpl-{}", Raw(b"1"), "\ud800", None, "")),
    *((DETOKENIZE, "tokens", entry) for entry in (Raw(b"1"), Raw(b"{}"), Raw(b"-1"), Raw(b"1e999"), "1", [])),
    *((TEXT, "prompt", entry) for entry in (Raw(b"1"), Raw(b"-1"), Raw(b"{}"), "a", "a{}", "", [1], [], None, 0.5)),
    *((TEXT, "prompt.0", entry) for entry in (Raw(b"1"), Raw(b"-1"), "a")),
    *((route, "stop", entry) for route in (CHAT, TEXT) for entry in ("a{}", "", "\ud800", 1)),
    *((route, "bad_words", entry) for route in (CHAT, TEXT) for entry in ("a{}", "a b c d e {}", "", 1)),
    *((TEXT, name, Raw(b"{}")) for name in ("stop_token_ids", "allowed_token_ids")),
    *((TEXT, name, Raw(b"1")) for name in ("stop_token_ids", "allowed_token_ids", "no_such_field")),
    *((CHAT, "messages", {"role": "user", "content": one}) for one in ("Hi", "", "\ud800")),
    *((CHAT, "messages", entry) for entry in (Raw(b"{}"), 1, [], None)),
    *((CHAT, "messages.0.content", entry) for entry in ({"type": "text", "text": "a"}, {"type": "image_url"}, 1)),
    (CHAT, "messages.0.tool_calls", {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}),
    (CHAT, "tools", {"type": "function", "function": {"name": "f{}", "parameters": {"type": "object"}}}),
    (TOKENIZE, "messages", {"role": "user", "content": "Hi"}),
    (CHAT, "chat_template_kwargs.enable_thinking", "a{}"),
    (CHAT, "metadata.a", "a{}"),
)
_FLOODS_OF_KEYS = (
    *((TEXT, "logit_bias", one) for one in (1, 1e308, "a", None)),
    *((CHAT, name, 1) for name in ("metadata", "chat_template_kwargs", "messages.0", "messages.0.content.0")),
    *((CHAT, name, "a") for name in ("tools.0.function.parameters", "response_format.json_schema", "stream_options")),
)


def flood(draw: random.Random) -> Body:
    """Very many entries where a few are expected: most often thousands, at times as many as a body can hold."""
    if draw.random() < 0.2:
        route, place, entry = draw.choice(_FLOODS_OF_KEYS)
        count = _count(draw, MAX_BODY_BYTES // 12, 300_000)
        value: Any = FloodOfKeys(entry, count)
    else:
        route, place, entry = draw.choice(_FLOODS)
        size = len(write(entry)) + 1
        count = _count(draw, (MAX_BODY_BYTES - 1_000) // (size + 8), MAX_BODY_BYTES)
        value = Flood(entry, count, fresh=True)
        if b"{}" not in write(entry) or entry == {}:
            value = Flood(entry, count)
    return route.path, write(put(route.body, place, value)), f"{count} entries in {place}"


def products(draw: random.Random) -> Body:
    """Several lists and counts, each within its own bound, that together are much work."""
    route = draw.choice((CHAT, TEXT, TEXT))
    numbers = list(range(draw.choice((10, 1_000, 40_000))))
    given: dict[str, Any] = {
        "n": draw.choice((2, 16, 128)),
        "stop": ["".join(draw.choices("ab", k=100)) for _ in range(draw.choice((1, 64)))],
        "bad_words": [f"{i} a" for i in range(draw.choice((1, 1_000)))],
        "allowed_token_ids": numbers,
        "stop_token_ids": numbers[:1_000],
        "logit_bias": {str(i): 1 for i in numbers[:1_000]},
        "prompt_logprobs": draw.choice((1, 20)),
        "logprobs": True if route is CHAT else draw.choice((1, 20)),
        "echo": route is TEXT,
        "stream": draw.random() < 0.5,
        "return_token_ids": True,
    }
    names = draw.sample(list(given), draw.randint(2, len(given)))
    body = {**route.body, **{name: given[name] for name in names}}
    if route is TEXT and draw.random() < 0.7:
        body["prompt"] = [draw.choice(("a", "a b " * 100))] * draw.choice((2, 30, 1_024))
    elif route is CHAT:
        body["messages"] = [{"role": "user", "content": "a b " * draw.choice((1, 400))}]
        if "logprobs" in names:
            body["top_logprobs"] = 20
    return route.path, write(body), " x ".join(names)


def unknown_ids(draw: random.Random) -> Body:
    """Ids, names and keys that nothing has."""
    route, place = draw.choice(
        ((ABORT, "request_ids"), (DETOKENIZE, "tokens"), (CHAT, "model"), (TEXT, "stop_token_ids"))
    )
    count = draw.choice((1, 50, 5_000))
    texts = [f"cmpl-{draw.randrange(10**9):x}" for _ in range(count)]
    ids = [draw.randrange(10**5, 2**31) for _ in range(count)]
    value = texts if route is ABORT else texts[0] if place == "model" else ids
    return route.path, write(put(route.body, place, value)), f"{count} unknown in {place}"


def _count(draw: random.Random, most: int, cap: int) -> int:
    """Log-uniform, with a preference for what is still quick to make and send."""
    top = min(most, cap) if draw.random() < 0.04 else min(most, 20_000)
    return int(10 ** draw.uniform(1, len(str(top)) - 1 + top / 10 ** len(str(top))))


_SAMPLES: tuple[Callable[[int], str], ...] = (
    lambda n: "a" * n,
    lambda n: " " * n,
    lambda n: "\n" * n,
    lambda n: " \n\t" * (n // 3),
    lambda n: "1234567890" * (n // 10),
    lambda n: "!@#$%^&*" * (n // 8),
    lambda n: "word " * (n // 5),
    lambda n: "don't've'll" * (n // 11),
    lambda n: "é" * (n // 2),
    lambda n: "漢" * (n // 3),
    lambda n: "e" + "\u0301" * (n // 2),
    lambda n: "🏳️‍🌈" * (n // 14),
    lambda n: "\x00" * n,
    lambda n: "\u1160" * (n // 3),
    lambda n: "<|im_start|>" * (n // 12),
    lambda n: "<|im_end|>\n<|im_start|>user\n" * (n // 28),
    lambda n: "ab" * (n // 2) + "\ud800",
    lambda n: "\ud800" * (n // 6),
)
_LONG_PLACES: tuple[tuple[Route, str], ...] = (
    *((TEXT, place) for place in ("prompt", "prompt.0", "stop", "stop.0", "bad_words.0", "user", "cache_salt")),
    *((TEXT, place) for place in ("request_id", "model", "suffix", "no_such_field", "guided_json")),
    *((CHAT, place) for place in ("messages.0.content", "messages.0.role", "messages.0.name", "stop", "chat_template")),
    *((CHAT, place) for place in ("messages.0.content.0.text", "tools.0.function.name", "metadata.a", "tool_choice")),
    *((CHAT, place) for place in ("messages.0.tool_calls.0.function.arguments", "reasoning_effort", "messages.0.a")),
    *((CHAT, place) for place in ("chat_template_kwargs.enable_thinking", "response_format.type", "user")),
    *((TOKENIZE, place) for place in ("prompt", "messages.0.content", "chat_template")),
    *((ABORT, place) for place in ("request_ids.0", "request_ids")),
    (DETOKENIZE, "tokens"),
)


def long_string(draw: random.Random) -> Body:
    """One string of up to a whole body."""
    route, place = draw.choice(_LONG_PLACES)
    top = MAX_BODY_BYTES - 2_000 if draw.random() < 0.06 else 200_000
    size = int(10 ** draw.uniform(2.5, len(str(top)) - 1)) if top < 10**7 else draw.randint(10**6, top)
    sample = draw.randrange(len(_SAMPLES))
    text = _SAMPLES[sample](size)
    if place == "messages.0.content.0.text":
        body = put(route.body, "messages.0.content", [{"type": "text", "text": text}])
    else:
        body = put(route.body, place, text)
    # As an escape a letter takes up to six bytes; raw, it takes what UTF-8 takes. Lone surrogates exist only escaped.
    escaped = draw.random() < 0.2 or "\ud800" in text
    data = json.dumps(body, ensure_ascii=escaped).encode()
    return route.path, data[: MAX_BODY_BYTES + 1_000], f"{size} characters (sample {sample}) in {place}"


def nesting(draw: random.Random) -> Body:
    """Arrays and objects inside each other, closed or not, where a value goes or as the whole body."""
    depth = int(10 ** draw.uniform(1, 6))
    deep: Any = Deep(depth, as_objects=draw.random() < 0.5)
    if draw.random() < 0.2:
        deep = Raw(write(deep)[: depth * 3])
    route = draw.choice((*ROUTES, *PLANNED[:3]))
    if draw.random() < 0.2:
        return route.path, write(deep), f"{depth} levels"
    place = draw.choice(route.places)
    return route.path, write(put(route.body, place, deep)), f"{depth} levels in {place}"


# ---- what is not JSON


def not_json(draw: random.Random) -> Body:
    """A good body, cut, damaged, in another encoding, or followed by something."""
    route = draw.choice((*ROUTES[:5], *ROUTES[:2], *PLANNED[:2]))
    good = write(route.body)
    damage = draw.randrange(12)
    at = draw.randrange(len(good))
    match damage:
        case 0:
            bad = good[:at]
        case 1:
            bad = good[:at] + draw.randbytes(draw.randint(1, 40)) + good[at:]
        case 2:
            bad = good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :]
        case 3:
            bad = good.decode().encode(draw.choice(("utf-16", "utf-32", "utf-16-le", "cp037")))
        case 4:
            bad = draw.choice((b"\xef\xbb\xbf", b" " * 100_000, b"\x00", b"//a\n", b"/**/")) + good
        case 5:
            bad = good + draw.choice((b"{}", b"]", b"\x00", b"x" * 10_000, b"," + good, b"\n" * 100_000))
        case 6:
            bad = draw.choice((b"", b" ", b"null", b"true", b"0", b'""', b"[]", b"[{}]", b"{", b"}", b"NaN", b'"a'))
        case 7:
            bad = draw.randbytes(draw.randint(1, 3_000))
        case 8:
            bad = b"".join(draw.choices((b"{", b"}", b"[", b"]", b'"', b":", b",", b"1", b"null", b"\\", b"e"), k=300))
        case 9:
            bad = write(Pairs(tuple(list(route.body.items()) * draw.randint(2, 2_000))))
        case 10:
            bad = good.replace(b'"', b"'")
        case _:
            bad = good.replace(b":", draw.choice((b"::", b"=", b":\x0b", b": \xc2\xa0", b":,")), 1)
    return route.path, bad, f"damage {damage}"


# ---- templates of the caller's

_TEMPLATES = (
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{{ 'a' | center(5000000000) }}",
    "{{ 'a' * 5000000000 }}",
    "{{ [0] * 900000000 }}",
    "{{ ('a' * 99999) | list | join('b' * 99999) }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ messages | tojson(indent=99999999) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include 'a' %}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ raise_exception('a' * 100000) }}",
    "{{ raise_exception('\ud800') }}",
    "{{ strftime_now('%Y' * 100000) }}",
    "{{ strftime_now('\\ud800') }}",
    "{{ '\ud800' }}",
    "{{ messages[0].content.nothing.here }}",
    "{% for a in",
    "{{ " * 5_000,
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "{{ " + "1+" * 20_000 + "1 }}",
    "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "{{ a" + "|upper" * 20_000 + " }}",
    "{% set messages = 1 %}{{ messages }}",
    "",
    " ",
    "{{ messages }}",
    "{{ 'x' | list | random }}{{ lipsum(n=10000) }}",
    "{{ (range(99999) | list | string) * 3000 }}",
    "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!' | wordwrap(1) | urlize | striptags }}",
    "{{ '<' * 300000 | striptags }}",
)


def template(draw: random.Random) -> Body:
    """A chat template that loops, grows, recurses, reaches for Python, or is none."""
    route = draw.choice((CHAT, TOKENIZE))
    number = draw.randrange(len(_TEMPLATES))
    body = {**CHAT.body, "chat_template": _TEMPLATES[number]}
    if route is TOKENIZE:
        del body["max_tokens"], body["seed"]
    if draw.random() < 0.2:
        body["continue_final_message"] = True
        body["messages"] = [{"role": "assistant", "content": "Hi"}]
    return route.path, write(body), f"template {number}"
