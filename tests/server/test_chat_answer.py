"""An answer to a conversation put together from many deltas."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import ServerConfig
from pagoda.server.dialects.openai import chat
from pagoda.server.dialects.openai.chat import ChatCompletionRequest
from pagoda.server.render import Rendered
from pagoda.server.respond import RunningTurn

NUM_DELTAS = 50


def test_log_probabilities_of_the_prompt_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[int, Logprob] | None] = [None, {7: Logprob(-0.5, 1, "g")}]
    num_converted = 0
    convert = chat.prompt_logprobs

    def counting(given: Any) -> Any:
        nonlocal num_converted
        num_converted += 1
        return convert(given)

    async def deltas() -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for i in range(NUM_DELTAS):
            is_last = i == NUM_DELTAS - 1
            part = CompletionOutput(0, "a", [97], None, None, "length" if is_last else None, None)
            yield 0, RequestOutput("r", None, [1, 7], [part], is_last, prompt_logprobs=entries)

    monkeypatch.setattr(chat, "prompt_logprobs", counting)
    generation: Any = SimpleNamespace(
        close=lambda: None,
        outputs=lambda: contextlib.aclosing(deltas()),
        num_prompt_tokens=2,
        num_output_tokens=50,
        num_tokens=52,
        num_cached_tokens=0,
        num_reasoning_tokens=None,
    )
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], prompt_logprobs=1)
    turn: Any = SimpleNamespace(id="id", created=0, model="m", generation=generation)
    state: Any = SimpleNamespace(writes_ids=lambda body: False, config=ServerConfig())
    running = RunningTurn(generation, [Rendered([1], SamplingParams())], chat.CHAT.answer(body, turn, state), False)
    answer = msgspec.json.decode(asyncio.run(running.whole()).body)
    assert num_converted == 1
    assert answer["choices"][0]["message"]["content"] == "a" * NUM_DELTAS
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["7"]["logprob"] == -0.5
