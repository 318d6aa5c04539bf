"""An answer to a completion put together from deltas."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import ServerConfig
from pagoda.server.dialects.openai.completions import COMPLETIONS, CompletionRequest, completion_logprobs
from pagoda.server.render import Rendered
from pagoda.server.respond import RunningTurn


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
        close=lambda: None,
        outputs=lambda: contextlib.aclosing(deltas()),
        requests=[SimpleNamespace(prompt_token_ids=np.zeros(5_000, np.int32), num_embeds=0)],
        num_prompt_tokens=5_000,
        num_output_tokens=2,
        num_tokens=5_002,
        num_cached_tokens=0,
        num_reasoning_tokens=None,
    )
    body = CompletionRequest(prompt="x", echo=True)
    turn: Any = SimpleNamespace(id="id", created=0, model="m", generation=generation, text=Texts())
    state: Any = SimpleNamespace(writes_ids=lambda body: False, config=ServerConfig())
    running = RunningTurn(generation, [Rendered([1], SamplingParams())], COMPLETIONS.answer(body, turn, state), False)
    answer = msgspec.json.decode(asyncio.run(running.whole()).body)
    assert answer["choices"][0]["text"] == "the prompt, aa"
    assert asked == [(5_000, False)]


def test_a_tokens_own_log_probability_stays_beside_others_of_the_same_text() -> None:
    entry = {1: Logprob(-2.0, 1, ""), 2: Logprob(-3.0, 2, ""), 3: Logprob(-4.0, 3, "")}
    shown, _ = completion_logprobs([3], [entry], 2, 0, lambda _: "")
    assert (shown.token_logprobs, shown.top_logprobs) == ([-4.0], [{"": -4.0}])
