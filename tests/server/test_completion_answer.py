"""An answer to a completion put together from deltas."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.server.answers import PromptTokensDetails, Usage
from pagoda.server.completions import CompletionFormat
from pagoda.server.protocol import CompletionRequest
from pagoda.server.respond import Head, whole_answer


def test_a_long_echoed_prompt_is_decoded_once_and_on_a_thread() -> None:
    asked: list[tuple[int, bool]] = []

    class Texts:
        def decode(self, token_ids: Sequence[int]) -> str:
            asked.append((len(token_ids), threading.current_thread() is threading.main_thread()))
            return "the prompt, "

    async def deltas() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for is_last in (False, True):
            part = CompletionOutput(0, "a", [97], None, None, "length" if is_last else None, None)
            yield 0, RequestOutput("r", None, [1, 7], [part], is_last)

    generation: Any = SimpleNamespace(
        outputs=lambda: contextlib.aclosing(deltas()),
        requests=[SimpleNamespace(prompt_token_ids=np.zeros(5_000, np.int32), num_embeds=0)],
        usage=Usage(5_000, 2, 5_002, PromptTokensDetails(0)),
    )
    body = CompletionRequest(prompt="x", echo=True)
    texts: Any = SimpleNamespace(text=Texts())
    answer_format = CompletionFormat(Head("id", 0, "m"), generation, body, texts, False)
    answer = msgspec.json.decode(asyncio.run(whole_answer(generation, answer_format, body)).body)
    assert answer["choices"][0]["text"] == "the prompt, aa"
    assert asked == [(5_000, False)]
