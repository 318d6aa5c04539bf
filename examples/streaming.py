"""AsyncLLM: requests of all tasks run in one batch. Leaving a stream ends its request and frees its memory."""

import asyncio
import contextlib

from pagoda import AsyncLLM, SamplingParams


async def count(llm: AsyncLLM, name: str, prompt: str) -> str:
    """Read a stream to its end."""
    pieces = [
        delta.outputs[0].text async for delta in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=16))
    ]
    return f"{name}: {len(pieces)} pieces, {''.join(pieces)!r}"


async def first_word(llm: AsyncLLM, prompt: str) -> str:
    """Read a stream up to its first space, and leave."""
    text = ""
    params = SamplingParams(temperature=0.0, max_tokens=200)
    async with contextlib.aclosing(llm.stream(prompt, params)) as deltas:  # aborts the request on the way out
        async for delta in deltas:
            text += delta.outputs[0].text
            if " " in text.strip():
                break
    return text.split()[0]


async def main() -> None:
    async with AsyncLLM("smollm2-135m", max_model_len=512) as llm:
        both = asyncio.gather(count(llm, "a", "One, two, three,"), count(llm, "b", "Monday, Tuesday,"))
        print("first word:", await first_word(llm, "The sky is"))
        print("\n".join(await both))


if __name__ == "__main__":
    asyncio.run(main())
