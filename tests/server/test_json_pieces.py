"""Large JSON bodies are counted before they are decoded, large answers encoded in pieces: both held to plain Python."""

import asyncio
import json
import random
from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.json_answer import json_pieces
from pagoda.server.json_structure import check_structure, count_large_exponents, count_structure

TEXTS = ["", "a", '"', "\\", '\\"', '\\\\"', "[1,2]", '{"a":1,', ",,,", "\\u0022", "é\U0001f600"]


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.choice("tnld") if depth else rng.choice("tn")
    if kind == "t":
        return "".join(rng.choices(TEXTS, k=rng.randint(0, 4)))
    if kind == "n":
        return rng.choice([0, -1.5, None, True, 10**9])
    size = rng.choice([0, 1, 3, 200])
    if kind == "l":
        return [random_value(rng, depth - 1) for _ in range(size)]
    return {f"{rng.choice(TEXTS)}{index}": random_value(rng, depth - 1) for index in range(size)}


def count(value: Any) -> tuple[int, int, int]:
    """(values, objects and lists, keys)"""
    if not isinstance(value, dict | list):
        return 1, 0, 0
    parts = [count(item) for item in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + sum(p[0] for p in parts), 1 + sum(p[1] for p in parts), keys + sum(p[2] for p in parts)


def test_structure_is_counted_as_a_decoder_finds_it() -> None:
    rng = random.Random(3)
    for seed in range(60):
        value = random_value(rng, 3)
        text = json.dumps(value, ensure_ascii=seed % 2 == 0).encode()
        values, containers, keys = count(value)
        num_values, num_objects = count_structure(text)
        assert num_objects == containers + keys, text[:200]
        # Empty containers are counted with a value inside, which is the safe side.
        assert values <= num_values <= values + containers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0),
        (b"1e300", 1),
        (b"[1e+308,1E-310,1e22,1e30,-1.5e299,12,true,false]", 3),
        (b'{"a1e300":"1e300 \\"1e300","b":1e300}', 1),
        (b"1e0000300", 1),
        (b"[1e30,1e3", 0),
        (b"1e", 0),
    ],
)
def test_large_exponents_are_counted_outside_strings(text: bytes, expected: int) -> None:
    assert count_large_exponents(text) == expected


@pytest.mark.parametrize("size", [2_000, 200_000])
def test_numbers_that_are_slow_to_decode_are_refused_before_decoding(size: int) -> None:
    body = b'{"prompt":"a","logit_bias":{"1":' + b"[" + b"1e308," * size + b"1]}}"
    with pytest.raises(RequestError, match=f"{size} numbers with an exponent .* limit of 1024 .body_exponents."):
        asyncio.run(check_structure(body, RequestLimits()))
    asyncio.run(check_structure(body.replace(b"1e308", b"1e+30"), RequestLimits()))


@pytest.mark.parametrize("escape", [b"\\n", b"\\u00e9"])
def test_text_in_escapes_is_bounded_before_decoding(escape: bytes) -> None:
    def body(num_escapes: int) -> bytes:
        return b'{"prompt":"' + escape * num_escapes + b'"}'

    asyncio.run(check_structure(body(1_500_000), RequestLimits()))
    with pytest.raises(RequestError, match="1500001 backslashes in a body .* limit of 1500000 .body_escapes."):
        asyncio.run(check_structure(body(1_500_001), RequestLimits()))


def test_an_answer_in_pieces_is_the_answer() -> None:
    async def encoded(value: Any) -> bytes:
        return b"".join([piece async for piece in json_pieces(value)])

    rng = random.Random(4)
    for _ in range(60):
        value = random_value(rng, 3)
        assert json.loads(asyncio.run(encoded(value))) == value
    tokens = {"choices": [{"logprobs": {"tokens": ["a" * 50] * 100_000, "top": [None] * 3}}], "usage": {}}
    assert json.loads(asyncio.run(encoded(tokens))) == tokens


def test_the_loop_runs_between_the_pieces_of_a_large_answer() -> None:
    async def turns() -> int:
        count = 0

        async def other() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async for _ in json_pieces({"tokens": list(range(1_000_000))}):
            pass
        task.cancel()
        return count

    assert asyncio.run(turns()) > 50
