"""BoundedEncoder: like TextEncoder, but with bounds on time and memory, for tokenizers that may exceed any."""

import array
import json
import pickle
import queue
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from pagoda.base.errors import RequestError
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.killable_process import KillableProcess
from pagoda.engine.templates.special_marks import SpecialMarks
from pagoda.engine.tokenizers.encoder_worker import ENCODED, HEAD

_NUM_PROCESSES = 4  # as many as TextThreads has threads


@dataclass(frozen=True, slots=True)
class EncodingLimits:
    """Limits of one text.   timeout_s: for encoding it.   memory_bytes: for encoding it."""

    timeout_s: float = 5.0
    memory_bytes: int = 2 * 2**30


class BoundedEncoder:
    """Encodes in a few child processes, which are started on first use and killed at the deadline. Thread-safe.

    A call waits while all of them are at work.
    """

    inline_chars = 0  # an event loop encodes no text itself

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        marks: SpecialMarks,
        unknown: str | None,
        limits: EncodingLimits | None = None,
    ) -> None:
        """unknown: the unknown token, which encoding any text may produce."""
        self._limits = limits or EncodingLimits()
        first = pickle.dumps((backend.to_str(), marks, unknown), 5)
        module = "pagoda.engine.tokenizers.encoder_worker"
        self._processes = [
            KillableProcess(module, self._limits.memory_bytes, first=lambda: first, has_stderr=False)
            for _ in range(_NUM_PROCESSES)
        ]
        self._idle: queue.LifoQueue[KillableProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def encode(self, text: str, add_special_tokens: bool = True, cancellation: Cancellation | None = None) -> list[int]:
        """See Tokenizer.encode. Raises RequestError for a text that exceeds the limits, too."""
        return self._ask(text, False, add_special_tokens, "prompt", cancellation)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer.encode_batch. Each text has its own limits."""
        return [self.encode(text) for text in texts]

    def encode_marked(
        self, text: str, add_special_tokens: bool = False, cancellation: Cancellation | None = None
    ) -> list[int]:
        """See Tokenizer.encode_marked. Raises RequestError for a text that exceeds the limits, too."""
        return self._ask(text, True, add_special_tokens, "messages", cancellation)

    def close(self) -> None:
        """Kill the processes, even at work. Idempotent; another text starts a new one."""
        for process in self._processes:
            process.close()

    def _ask(
        self, text: str, is_marked: bool, add_special_tokens: bool, param: str, cancellation: Cancellation | None
    ) -> list[int]:
        message = HEAD.pack(is_marked, add_special_tokens) + text.encode("utf-8", "surrogatepass")
        process = self._idle.get()
        try:
            reply = process.exchange(lambda _: message, self._limits.timeout_s, cancellation)
        except TimeoutError:
            said = f"the tokenizer was stopped after {self._limits.timeout_s:g} s, on {len(text)} characters of text"
            raise RequestError(f"{param}: {said}", param) from None
        except EOFError:
            said = f"the tokenizer crashed, or needed too much memory, on {len(text)} characters of text"
            raise RequestError(f"{param}: {said}", param) from None
        finally:
            self._idle.put(process)
        if reply[0] != ENCODED:
            raise RequestError(*json.loads(reply[1:]))
        ids = array.array("i")
        ids.frombytes(reply[1:])
        return ids.tolist()
