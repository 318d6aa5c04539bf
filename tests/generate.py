"""Run a prompt on an AsyncEngine, from its text or tokens to its last output."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.prompts import Prompt, text_of
from pagoda.engine.outputs.output_processor import OutputKind


async def prepare(
    llm: AsyncEngine, prompt: Prompt, params: Params, request_id: str | None = None, **more: Any
) -> Request:
    """Return a request that arrives now.   more: arguments of AsyncText.make_request."""
    request_id = request_id or uuid.uuid4().hex
    return await llm.text.make_request(prompt, params, request_id, arrival_time_s=time.perf_counter(), **more)


async def generate(
    llm: AsyncEngine,
    prompt: Prompt,
    params: SamplingParams,
    request_id: str | None = None,
    *,
    kind: OutputKind = OutputKind.CUMULATIVE,
    lora: Adapter | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the request's outputs. Leaving the iteration aborts it."""
    request = await prepare(llm, prompt, params, request_id, lora=lora)
    async with contextlib.aclosing(llm.stream(request, kind, text_of(prompt))) as outputs:
        async for output in outputs:
            yield output
