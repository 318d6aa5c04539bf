"""A slow reader gets everything, in one piece."""

import asyncio

import pytest

from pagoda.base.errors import WorkerDied
from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.engine.outputs.mailbox import Mailbox
from pagoda.engine.outputs.output_processor import OutputKind


def delta(*parts: tuple[int, str, list[int]], finished: bool = False) -> RequestOutput:
    outputs = [
        CompletionOutput(
            i, text, ids, logprobs=[{t: Logprob(-1.0)} for t in ids], finish_reason="stop" if finished else None
        )
        for i, text, ids in parts
    ]
    return RequestOutput("r", outputs=outputs, finished=finished)


def test_deltas_are_joined_and_nothing_is_lost() -> None:
    async def main() -> None:
        box = Mailbox(OutputKind.DELTA)
        box.put(delta((1, "a", [1])))
        box.put(delta((0, "x", [7]), (1, "b", [2, 3])))
        box.put(delta((1, "c", [4]), finished=True))
        got = await box.get()
        assert [(p.index, p.text, p.token_ids, p.finish_reason) for p in got.outputs] == [
            (0, "x", [7], None),
            (1, "abc", [1, 2, 3, 4], "stop"),
        ]
        assert [len(p.logprobs or []) for p in got.outputs] == [1, 4]
        assert got.finished

    asyncio.run(main())


def test_a_newer_cumulative_output_replaces_an_unread_one() -> None:
    async def main() -> None:
        box = Mailbox(OutputKind.CUMULATIVE)
        box.put(delta((0, "a", [1])))
        box.put(delta((0, "ab", [1, 2])))
        assert (await box.get()).outputs[0].text == "ab"

    asyncio.run(main())


def test_outputs_before_a_death_are_read_before_the_error() -> None:
    async def main() -> None:
        box = Mailbox(OutputKind.DELTA)
        box.put(delta((0, "a", [1])))
        box.fail(WorkerDied("gone"))
        assert (await box.get()).outputs[0].text == "a"
        with pytest.raises(WorkerDied):
            await box.get()

    asyncio.run(main())


def test_a_slow_reader_does_not_make_outputs_more_expensive() -> None:
    """Each step copies its own tokens only, not all that is unread."""
    copied = 0

    class Counted(list[int]):
        def __add__(self, other: list[int]) -> "Counted":  # type: ignore[override]
            nonlocal copied
            copied += len(self) + len(other)
            return Counted([*self, *other])

    async def main() -> None:
        box = Mailbox(OutputKind.DELTA)
        for token in range(2000):
            output = delta((0, "x", [token]))
            output.outputs[0].token_ids = Counted([token])
            box.put(output)
        got = await box.get()
        assert got.outputs[0].token_ids == list(range(2000))
        assert got.outputs[0].text == "x" * 2000
        assert copied <= 4 * 2000

    asyncio.run(main())


def test_an_output_that_was_read_does_not_grow_with_later_ones() -> None:
    async def main() -> None:
        box = Mailbox(OutputKind.DELTA)
        box.put(delta((0, "a", [1])))
        box.put(delta((0, "b", [2])))
        first = await box.get()
        box.put(delta((0, "c", [3])))
        box.put(delta((0, "d", [4])))
        assert (await box.get()).outputs[0].token_ids == [3, 4]
        assert first.outputs[0].token_ids == [1, 2]
        assert len(first.outputs[0].logprobs or []) == 2

    asyncio.run(main())
