"""Mailbox: hold a request's unread outputs, merged into one, so that a slow reader costs little memory."""

import asyncio
import dataclasses
from dataclasses import dataclass

from pagoda.base.errors import fresh
from pagoda.base.outputs import CompletionOutput, Logprob, RequestOutput
from pagoda.engine.outputs.output_processor import OutputKind


class Mailbox:
    """For one writer and one reader on an event loop. Holds at most one output; later ones are merged into it."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._unread: dict[int, GatheredPart] = {}
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. Takes time in proportion to its own size, however much is unread."""
        if self._output is not None and self._kind is OutputKind.DELTA:
            if not self._unread:
                self._add_parts(self._output)
            self._add_parts(output)
        self._output = output
        self._filled.set()

    def _add_parts(self, output: RequestOutput) -> None:
        for part in output.outputs:
            unread = self._unread.get(part.index)
            if unread is None:
                self._unread[part.index] = GatheredPart.of(part)
            else:
                unread.add(part)

    def fail(self, error: Exception) -> None:
        """Make `get` raise `error` after the pending output has been read."""
        self._error = error
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Wait for output; return all that arrived since the last call, merged. Raises the error given to `fail`."""
        await self._filled.wait()
        self._filled.clear()
        output, self._output = self._output, None
        unread, self._unread = self._unread, {}
        if output is None:
            assert self._error is not None
            raise fresh(self._error)
        if self._error is not None:
            self._filled.set()
        if unread:
            output = dataclasses.replace(output, outputs=[unread[index].merged() for index in sorted(unread)])
        return output


@dataclass(slots=True)
class GatheredPart:
    """Consecutive deltas of one sequence, as one.   last: the newest."""

    last: CompletionOutput
    texts: list[str]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None

    @classmethod
    def of(cls, part: CompletionOutput) -> "GatheredPart":
        logprobs = list(part.logprobs) if part.logprobs is not None else None
        return cls(part, [part.text], list(part.token_ids), logprobs)

    def add(self, part: CompletionOutput) -> None:
        self.last = part
        self.texts.append(part.text)
        self.token_ids += part.token_ids
        if self.logprobs is not None and part.logprobs is not None:
            self.logprobs += part.logprobs
        else:
            self.logprobs = None

    def merged(self) -> CompletionOutput:
        return dataclasses.replace(
            self.last, text="".join(self.texts), token_ids=self.token_ids, logprobs=self.logprobs
        )
