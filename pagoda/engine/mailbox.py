"""Mailbox: hold a request's unread outputs, merged into one, so that a slow reader costs no memory."""

import asyncio
import dataclasses

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.engine.output_processor import OutputKind


class Mailbox:
    """For one writer and one reader on an event loop. Holds at most one output; later ones are merged into it."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._output is not None and self._kind is OutputKind.DELTA:
            output = joined(self._output, output)
        self._output = output
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """Make `get` raise `error` after the pending output has been read."""
        self._error = error
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Wait for output; return all that arrived since the last call, merged. Raises the error given to `fail`."""
        await self._filled.wait()
        self._filled.clear()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is not None:
            self._filled.set()
        return output


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merge two consecutive deltas of one request."""
    parts = {part.index: part for part in first.outputs}
    for part in second.outputs:
        parts[part.index] = _joined_part(parts[part.index], part) if part.index in parts else part
    return dataclasses.replace(second, outputs=[parts[index] for index in sorted(parts)])


def _joined_part(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return dataclasses.replace(
        second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids, logprobs=logprobs
    )
