"""GrammarChecker: say whether a grammar compiles, with bounds on time and memory, before a request is accepted."""

import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pagoda.base.errors import RequestError
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.grammars.grammar_text import GrammarText, JsonStyle, schema_grammar
from pagoda.engine.grammars.json_schema import RewrittenSchema
from pagoda.engine.grammars.vocabulary import Vocabulary
from pagoda.engine.killable_process import KillableProcess

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
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        module = "pagoda.engine.grammars.checker_worker"
        self.process = KillableProcess(
            module, self._limits.memory_bytes, first=lambda: pickle.dumps(vocabulary(), 5), has_stderr=False
        )
        self._known: OrderedDict[str, str] = OrderedDict()  # text -> error, "" if it compiles

    def check(self, grammar: GrammarText, field_name: str, cancellation: Cancellation | None = None) -> None:
        """Raise RequestError if the grammar does not compile; for a JSON schema it names the place.

        cancellation: ends the compilation; then raises Cancelled.
        """
        with self._lock:
            error = self._try(grammar.text, cancellation)
            if error and grammar.schema is not None:
                at = self._locate(grammar.schema, cancellation)
                raise RequestError(f"{field_name}: at {at or '/'}: {error}", field_name)
        if error:
            raise RequestError(f"{field_name}: {error}", field_name)

    def close(self) -> None:
        """Kill the process, even at work. Idempotent; another grammar starts a new one."""
        self.process.close()

    # ---- with the lock held

    def _try(self, text: str, cancellation: Cancellation | None) -> str:
        """Return the error of a grammar, "" if it compiles."""
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            return known
        error = self._try_new(text, cancellation)
        self._known[text] = error
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return error

    def _try_new(self, text: str, cancellation: Cancellation | None) -> str:
        try:
            reply = self.process.exchange(lambda _: text.encode(), self._limits.timeout_s, cancellation)
            return _shorten(reply.decode("utf-8", "replace"))
        except TimeoutError:
            return f"it was not compiled within {self._limits.timeout_s:g} s; it is too complex"
        except EOFError:
            return "compiling it crashed or used too much memory; it is too complex"

    def _locate(self, schema: RewrittenSchema, cancellation: Cancellation | None) -> str:
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
                error = self._try_new(schema_grammar(alone, style), cancellation)
                if error:
                    at, current = schema.places[id(child)], child
                    break
            else:
                keyword = next((one for one in schema.uncertain if one.rpartition("/")[0] == at), None)
                return keyword or at


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
    if line == "NoExtensionBias":  # what the library says of a grammar without a first token
        return "no text satisfies it"
    if line.startswith("oneOf constraints"):
        return "its alternatives may overlap, and cannot be distinguished with the supported keywords; use anyOf"
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 3] + "..."
