"""An engine in this process, as the terminal commands use it: one answer at a time, streamed, stopped by Ctrl-C."""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pagoda.base.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagoda.llm import LLM

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to an answer.   num_tokens: of the answer so far."""

    text: str
    num_tokens: int
    finish_reason: str | None = None


class Interrupts:
    """Counts Ctrl-C while a step must not be cut in two; the second one goes through as KeyboardInterrupt."""

    def __init__(self) -> None:
        self.seen = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True

    @contextmanager
    def held(self) -> Iterator["Interrupts"]:
        """Within the block a first Ctrl-C only sets `seen`."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class Session:
    """A loaded model that answers one prompt after another."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._ids = itertools.count()

    @classmethod
    def start(cls, options: Mapping[str, object]) -> "Session":
        """Load the model; shows what is being fetched. Raises what LLM raises."""
        from pagoda.cli.console import fetching

        with fetching():
            from pagoda.llm import LLM

            return cls(LLM(**options))

    @property
    def max_model_len(self) -> int:
        return self._llm.max_model_len

    def encode(self, text: str) -> list[int]:
        """A text to continue, as token ids."""
        return self._llm.get_tokenizer().encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to the answer that is wanted. Raises ConfigError when the model has no chat template."""
        return self._llm.render_chat(messages)

    def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        """The answer as it comes. After Ctrl-C, or when the iterator is closed, the request is aborted."""
        engine = self._llm.engine
        request_id = f"cli-{next(self._ids)}"
        engine.add_request(request_id, token_ids, params)
        length = 0
        with Interrupts().held() as interrupts:
            try:
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        answer = output.outputs[0]
                        text, length = answer.text[length:], len(answer.text)
                        yield Piece(text, len(answer.token_ids), answer.finish_reason)
                    if interrupts.seen:
                        yield Piece("", 0, "abort")
                        return
            finally:
                engine.abort_request([request_id])


def seconds_since_start() -> float:
    """Since this process was started, Python's own start included; falls back on its CPU time off Linux."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
