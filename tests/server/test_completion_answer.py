"""An answer to a completion put together from deltas."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.server.completions import CompletionFormat
from pagoda.server.protocol import CompletionRequest
from pagoda.server.respond import Head, gather


def test_an_echoed_prompt_is_decoded_in_the_turns_of_its_key() -> None:
    asked: list[tuple[int, str]] = []

    class Texts:
        async def detokenize(self, token_ids: Sequence[int], key: str = "") -> str:
            asked.append((len(token_ids), key))
            return "the prompt, "

    async def deltas() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for is_last in (False, True):
            part = CompletionOutput(0, "a", [97], None, None, "length" if is_last else None, None)
            yield 0, RequestOutput("r", None, [1, 7], [part], is_last)

    generation: Any = SimpleNamespace(
        outputs=lambda: contextlib.aclosing(deltas()),
        requests=[SimpleNamespace(prompt_token_ids=np.zeros(5_000, np.int32), num_embeds=0)],
        key="one",
        num_prompt_tokens=5_000,
        num_output_tokens=2,
        num_cached_tokens=0,
    )
    body = CompletionRequest(prompt="x", echo=True)
    texts: Any = SimpleNamespace(text=Texts())
    answer_format = CompletionFormat(Head("id", 0, "m"), generation, body, texts)
    answer = msgspec.to_builtins(asyncio.run(gather(generation, answer_format, body)))
    assert answer["choices"][0]["text"] == "the prompt, aa"
    assert asked == [(5_000, "one")]
