"""Looks at the engine: one on its way serves all who look together."""

import asyncio
from types import SimpleNamespace
from typing import Any

from pagoda.server.looks import Looks


def test_whoever_asks_asks_for_the_steps_while_somebody_reads_them() -> None:
    """A look of /requests may be on its way during a long step: the page and a trace need its steps."""
    asked: list[float | None] = []

    async def look(steps_after_s: float | None) -> Any:
        asked.append(steps_after_s)
        return SimpleNamespace(steps=(SimpleNamespace(ended_s=len(asked)),) if steps_after_s is not None else ())

    async def work() -> None:
        looks = Looks(look)
        for readers in (looks.reads_steps, looks.stream):
            looks._asked_s = float("-inf")
            await looks.refresh()
            with readers():
                looks._asked_s = float("-inf")
                await looks.refresh()
        looks._asked_s = float("-inf")
        await looks.refresh()
        assert (asked, looks.num_steps) == ([None, 0.0, None, 2, None], 2)

    asyncio.run(work())
