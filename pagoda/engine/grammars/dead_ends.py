"""Parts of a JSON schema that no text can complete, and that the grammar library does not find when it compiles.

1. Patterns of `patternProperties` that match listed names only: the library writes a comma for one more property, and
   then no name is left.
2. Definitions that lead back to themselves without an end: an output would open one object in another for ever.
"""

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pagoda.engine.grammars.compiling import compile_grammar
from pagoda.engine.grammars.schema_size import MAX_PATTERN_CHARS, iter_values

_MAX_STEPS = 1500
"""Bytes of names that are compared with the patterns of one schema; each takes 20 to 500 µs."""
_STEPS_TO_COMPILE = 4
_CHARS_PER_STEP = 64  # a step takes longer in a long expression
_NAMES_PER_STEP = 256


class ListedNames:
    """The names of properties that a schema lists anywhere, to compare patterns with.

    is_exhausted: there was too much to compare; results after that are not known.
    """

    def __init__(self, schema: Any) -> None:
        objects = [one for one in iter_values(schema) if isinstance(one, dict)]
        listed = [name for one in objects for key in ("properties", "required") for name in _iterable(one.get(key))]
        names = {name for name in listed if isinstance(name, str)}
        self._texts = {json.dumps(name, ensure_ascii=False).encode(errors="replace"): name for name in names}
        self._num_steps = 0
        self._known: dict[str, list[str] | None] = {}  # what is known of patterns

    @property
    def is_exhausted(self) -> bool:
        return self._num_steps > _MAX_STEPS

    def matched_only(self, pattern: str) -> list[str] | None:
        """Return the listed names that a pattern matches if it matches no other string, None otherwise.

        The library itself is followed along the names, so the answer holds for the grammar that it makes of the
        pattern. None also for a pattern that it refuses.
        """
        if pattern not in self._known:
            self._known[pattern] = self._compare(pattern)
        return self._known[pattern]

    def _count(self, num_steps: int, pattern: str) -> None:
        self._num_steps += num_steps + len(pattern) // _CHARS_PER_STEP

    def _compare(self, pattern: str) -> list[str] | None:
        if len(pattern) > MAX_PATTERN_CHARS:
            return None
        self._count(_STEPS_TO_COMPILE, pattern)
        if self.is_exhausted:
            return None
        schema = json.dumps({"type": "string", "pattern": pattern})
        matcher = compile_grammar(_byte_tokenizer(), f"start: %json {schema}")
        if matcher.get_error():
            return [] if "Unsatisfiable" in matcher.get_error() else None
        found: list[str] = []
        todo = [(matcher, 0, list(self._texts))]
        while todo:
            matcher, depth, texts = todo.pop()
            self._count(1 + len(texts) // _NAMES_PER_STEP, pattern)
            if self.is_exhausted:
                return None
            by_byte: dict[int, list[bytes]] = {}
            for text in texts:
                if len(text) > depth:
                    by_byte.setdefault(text[depth], []).append(text)
                else:  # the matcher has taken its closing quote
                    found.append(self._texts[text])
            allowed = [] if matcher.is_accepting() else _allowed_bytes(matcher)
            if not by_byte.keys() >= set(allowed):
                return None
            for byte in allowed:
                following = matcher.deep_copy() if len(allowed) > 1 else matcher
                following.consume_token(byte)
                todo.append((following, depth + 1, by_byte[byte]))
        return found


def _iterable(value: Any) -> Iterable[Any]:
    return value if isinstance(value, dict | list) else ()


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _allowed_bytes(matcher: LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256]).tolist()


# ---- recursion without an end


@dataclass(slots=True)
class _Part:
    """A schema in a definition, or a choice between schemas.

    num_left: how many parts that it needs are not known to be finite.   needed_by: its parent, None for a definition.
    name: of a definition.
    """

    num_left: int
    needed_by: "_Part | None" = None
    name: str = ""


def endless(defs: dict[str, Any]) -> set[str]:
    """Return the names of definitions that no finite value satisfies, as far as their references decide about it.

    defs: rewritten schemas by what `$ref` calls them. Every schema is looked at once, however references wind.
    """
    graph = _Graph()
    for name, schema in defs.items():
        graph.add(schema, None, _Part(0, name=name))
    return defs.keys() - graph.finite()


class _Graph:
    """Which schemas of all definitions need which."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Part]] = {}  # what refers to a definition
        self._finite: list[_Part] = []  # what others may wait for

    def add(self, schema: Any, kind: Any, part: _Part) -> None:
        """Add a schema and what it needs.   kind: the `type` that applies to the same value, if one is known."""
        if isinstance(schema, dict):
            kind = schema.get("type", kind)
            if "$ref" in schema:
                part.num_left += 1
                self._waiting.setdefault(schema["$ref"], []).append(part)
            self._add_all(_listed(schema.get("allOf")), kind, part)
            for choice in filter(None, (_listed(schema.get("anyOf")), _listed(schema.get("oneOf")))):
                part.num_left += 1
                self._add_any(choice, kind, _Part(1, part))
            needed = {id(one): one for one in _needed(schema, kind)}  # several names may have the same schema
            self._add_all(list(needed.values()), None, part)
        if not part.num_left:
            self._finite.append(part)

    def _add_all(self, schemas: list[Any], kind: Any, part: _Part) -> None:
        part.num_left += len(schemas)
        self._add_any(schemas, kind, part)

    def _add_any(self, schemas: list[Any], kind: Any, part: _Part) -> None:
        for one in schemas:
            self.add(one, kind, _Part(0, part))

    def finite(self) -> set[str]:
        """Return the names of the definitions that a finite value satisfies."""
        found: set[str] = set()
        while self._finite:
            part = self._finite.pop()
            if part.needed_by is None:
                found.add(part.name)
                freed = self._waiting.get(part.name, [])
            else:
                freed = [part.needed_by]
            for one in freed:
                one.num_left -= 1
                if not one.num_left:
                    self._finite.append(one)
        return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _needed(schema: dict[str, Any], kind: Any) -> list[Any]:
    """Return the schemas of what a value of the type `kind` must contain."""
    if kind == "object":
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}  # the library refuses values of a wrong type
        return [known.get(name, others) for name in _iterable(schema.get("required")) if isinstance(name, str)]
    count, first = schema.get("minItems"), schema.get("prefixItems", [])
    if kind != "array" or not isinstance(count, int) or not isinstance(first, list):
        return []
    return first[:count] if count <= len(first) else [*first, schema.get("items", True)]
