"""The process that renders chat templates: `python -m pagoda.engine.templates.worker MEMORY_BYTES NICENESS PARENT_PID`.

A template is an untrusted program, so it runs in this process, where it may loop and allocate: the parent kills the
process at the deadline, the kernel enforces the memory limit, and an alarm kills it shortly after the deadline if the
parent does not. Requests arrive on standard input, a socket, pickled by the parent, which is trusted; replies are plain
bytes. Imports are few, so that a killed worker is replaced in about a tenth of a second.
"""

import json
import os
import pickle
import sys
from collections import OrderedDict

from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.killable_worker import Parent, limit_memory
from pagoda.engine.templates.chat_template import ChatTemplate

NUM_KEPT = 16
"""Size of the worker's LRU cache of compiled templates. The parent tracks the cached keys by the same rule."""
RENDERED, REFUSED, NOT_A_TEMPLATE, CANNOT_READ = range(4)
"""First byte of a reply; then the text, an error message, or an error message and its param as JSON."""

_MAX_TEXT_CHARS = 64 * 2**20
_MAX_GROWTH_BYTES = 64 * 2**20  # of resident memory: a worker that has grown by more is replaced


class _CannotRead(Exception):
    pass


class _Worker:
    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._templates: OrderedDict[bytes, ChatTemplate | None] = OrderedDict()
        self._started_kb = _peak_kb()

    def answer(self, data: bytes) -> bytes:
        outcome, text = self._outcome(data)
        return bytes([outcome]) + text

    def _outcome(self, data: bytes) -> tuple[int, bytes]:
        try:
            return RENDERED, self._render(data).encode("utf-8", "surrogatepass")
        except RequestError as error:
            return REFUSED, json.dumps([str(error), error.param]).encode()
        except ConfigError as error:
            return NOT_A_TEMPLATE, str(error).encode(errors="replace")
        except _CannotRead as error:
            return CANNOT_READ, str(error).encode(errors="replace")
        except MemoryError:
            said = f"the chat template needs more memory than its limit of {self._memory_bytes >> 20} MiB"
            return REFUSED, json.dumps([said, "messages"]).encode()
        except RecursionError:
            return REFUSED, json.dumps(["the chat template or the messages are nested too deeply", "messages"]).encode()

    def _render(self, data: bytes) -> str:
        try:
            key, source, values = pickle.loads(data)
        except (AttributeError, ImportError, TypeError, pickle.UnpicklingError) as error:
            raise _CannotRead(str(error)) from None
        template = self._templates.get(key)
        self._templates[key] = template
        self._templates.move_to_end(key)
        if len(self._templates) > NUM_KEPT:
            self._templates.popitem(last=False)
        if template is None:
            if source is None:
                raise RuntimeError("the parent sent the key of a template that is not cached")
            template = self._templates[key] = source.compile()
        text = template.render(*values)
        if len(text) > _MAX_TEXT_CHARS:
            raise RequestError(
                f"the chat template renders {len(text)} characters; at most {_MAX_TEXT_CHARS} are allowed", "messages"
            )
        return text

    def has_grown(self) -> bool:
        return (_peak_kb() - self._started_kb) * 1024 > _MAX_GROWTH_BYTES


def _peak_kb() -> int:
    """Return the peak resident memory in KiB. (getrusage would include the parent's, from before exec.)"""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def main() -> None:
    memory_bytes, niceness = map(int, sys.argv[1:3])
    os.nice(niceness)
    parent = Parent()
    limit_memory(memory_bytes)
    worker = _Worker(memory_bytes)
    parent.serve(worker.answer, worker.has_grown)


if __name__ == "__main__":
    main()
