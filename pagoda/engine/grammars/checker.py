"""GrammarChecker: say whether a grammar compiles, with bounds on time and memory, before a request is accepted."""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pagoda.base.child_signals import signals_blocked
from pagoda.base.errors import RequestError
from pagoda.engine.grammars.checker_worker import READY, receive, send
from pagoda.engine.grammars.grammar_text import GrammarText, JsonStyle, schema_grammar
from pagoda.engine.grammars.json_schema import RewrittenSchema
from pagoda.engine.grammars.vocabulary import Vocabulary

_START_S = 30.0  # for starting a process: imports can be slow on a busy machine, and do not count for the grammar
_MAX_KNOWN = 1024
_MAX_PROBES = 200
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """timeout_s: for compiling one grammar.   memory_bytes: for compiling it."""

    timeout_s: float = 5.0
    memory_bytes: int = 2**30


class GrammarChecker:
    """One process that compiles grammars, started on first use and after a kill. Thread-safe; one grammar at a time.

    Remembers the grammars that it has tried, by their text.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._known: OrderedDict[str, str] = OrderedDict()  # text -> error, "" if it compiles

    def check(self, grammar: GrammarText, field_name: str) -> None:
        """Raise RequestError if the grammar does not compile; for a JSON schema it names the place."""
        with self._lock:
            error = self._try(grammar.text)
            if error and grammar.schema is not None:
                at = self._locate(grammar.schema)
                raise RequestError(f"{field_name}: at {at or '/'}: {error}", field_name)
        if error:
            raise RequestError(f"{field_name}: {error}", field_name)

    def close(self) -> None:
        """Kill the process, even at work. Idempotent; another grammar starts a new one."""
        worker = self._worker
        if worker is not None:
            worker.process.kill()
        with self._lock:
            self._end()

    # ---- with the lock held

    def _try(self, text: str) -> str:
        """Return the error of a grammar, "" if it compiles."""
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            return known
        error = self._try_new(text)
        self._known[text] = error
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return error

    def _try_new(self, text: str) -> str:
        for is_last in (False, True):
            try:
                return _shorten(self._running().exchange(text, self._limits.timeout_s))
            except TimeoutError:
                self._end()
                return f"it was not compiled within {self._limits.timeout_s:g} s; it is too complex"
            except (EOFError, ConnectionError):
                # Something else may have killed the process: a grammar is to blame if it happens twice.
                self._end()
                if is_last:
                    return "compiling it crashed or used too much memory; it is too complex"
        raise AssertionError("not reached")

    def _locate(self, schema: RewrittenSchema) -> str:
        """Return the pointer of the innermost part of a schema that does not compile on its own."""
        style, probes = JsonStyle(), 0
        defs = schema.schema.get("$defs", {}) if isinstance(schema.schema, dict) else {}
        at, current = "", schema.schema
        seen = {id(current)}
        while True:
            for child in _subschemas(current, defs, schema.places):
                if id(child) in seen:
                    continue
                probes += 1
                if probes > _MAX_PROBES:
                    return at
                seen.add(id(child))
                alone = RewrittenSchema({**child, "$defs": defs})
                error = self._try_new(schema_grammar(alone, style))
                if error:
                    at, current = schema.places[id(child)], child
                    break
            else:
                keyword = next((one for one in schema.uncertain if one.rpartition("/")[0] == at), None)
                return keyword or at

    def _running(self) -> "_Worker":
        if self._worker is not None and not self._worker.is_usable():
            self._end()
        if self._worker is None:
            self._worker = _Worker(self._vocabulary(), self._limits.memory_bytes)
        return self._worker

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


def _subschemas(schema: object, defs: dict[str, object], places: dict[int, str]) -> list[dict[str, object]]:
    """Return the schemas directly inside a rewritten one; a reference counts as what it names.

    Of combinations that the rewriter wrote, which have no place of their own, return what they combine.
    """
    if not isinstance(schema, dict):
        return []
    found: list[object] = []
    for name, value in schema.items():
        if name in ("properties", "patternProperties"):
            found += value.values()
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found += value
        elif name in ("items", "additionalProperties"):
            found.append(value)
        elif name == "$ref":
            found.append(defs.get(value.removeprefix("#/$defs/")))
    placed: list[dict[str, object]] = []
    for one in found:
        if isinstance(one, dict):
            placed += [one] if id(one) in places else _subschemas(one, defs, places)
    return placed


_PLACE_IN_TEXT = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


def _shorten(message: str) -> str:
    """Return the first line of the library's message; the grammar's own text follows it."""
    line = _PLACE_IN_TEXT.sub("", message.strip().split("\n", 1)[0])
    if line.startswith("oneOf constraints"):
        return "its alternatives may overlap, and cannot be distinguished with the supported keywords; use anyOf"
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 3] + "..."


class _Worker:
    """A running process."""

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs, signals_blocked(signal.SIGINT):  # Ctrl-C is for the parent
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pagoda.engine.grammars.checker_worker"),
                    *(str(memory_bytes), str(os.getpid())),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _kill, self.process, self._connection, self._owner)
        self._connection.settimeout(_START_S)
        send(self._connection, pickle.dumps(vocabulary, 5))
        if self._connection.recv(1) != READY:
            raise EOFError("the process did not start")

    def is_usable(self) -> bool:
        """Return False if the process has exited, or if this is a fork of the process that started it."""
        return os.getpid() == self._owner and self.process.poll() is None

    def exchange(self, text: str, timeout_s: float) -> str:
        """Return a grammar's error. Raises TimeoutError, EOFError or ConnectionError if the process is unusable."""
        until_s = time.monotonic() + timeout_s
        self._connection.settimeout(timeout_s)
        send(self._connection, text.encode())
        self._connection.settimeout(max(0.001, until_s - time.monotonic()))
        return receive(self._connection).decode("utf-8", "replace")

    def end(self) -> None:
        self._finalizer()


def _kill(process: "subprocess.Popen[bytes]", connection: socket.socket, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
