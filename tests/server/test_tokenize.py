"""Routes that tokenise are admitted like others, and long texts do not keep short ones waiting."""

import asyncio
import threading

import httpx
import pytest

from pagoda.base.server_config import ServerConfig, ServerLimits
from pagoda.engine.async_text import AsyncText
from tests.fake_engine import byte_inputs
from tests.server.in_process import served


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]}), ("/v1/completions", {"prompt": "Hi"})],
)
def test_what_tokenises_counts_for_its_key(path: str, body: dict[str, object]) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "one", "two")]
        answers = [await http.post(path, json=body, headers=key) for key in keys]
        assert [answer.status_code == 429 for answer in answers] == [False, True, False]

    served(test, ServerConfig(api_keys=("one", "two"), server_limits=ServerLimits(requests_per_minute_per_key=1)))


def test_short_texts_do_not_wait_for_long_ones() -> None:
    inputs = byte_inputs()
    plain, may_end = inputs.prompts.encode, threading.Event()

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 100_000 or may_end.wait(30)
        return plain(text, add_special_tokens)

    inputs.prompts.encode = encode  # type: ignore[method-assign]

    async def main() -> None:
        text = AsyncText(inputs)
        long = [asyncio.create_task(text.encode("a" * 100_000)) for _ in range(20)]
        await asyncio.sleep(0)
        assert len(await asyncio.wait_for(text.encode("a" * 5_000), 30)) == 5_000
        assert not any(one.done() for one in long)
        may_end.set()
        await asyncio.gather(*long)
        text.close()

    asyncio.run(main())
