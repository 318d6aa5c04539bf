"""Run a prompt on an AsyncEngine, from its text or tokens to its last output."""

import contextlib
from collections.abc import AsyncGenerator

from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.inputs.adapters import Adapter
from pagoda.engine.inputs.prompts import Prompt, text_of
from pagoda.engine.outputs.output_processor import OutputKind


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
    request = await llm.prepare(prompt, params, request_id, lora=lora)
    async with contextlib.aclosing(llm.stream(request, kind, text_of(prompt))) as outputs:
        async for output in outputs:
            yield output
