"""Parts of a JSON schema that no text can complete, and that the grammar library does not find when it compiles.

1. Patterns of `patternProperties` that match listed names only: the library writes a comma for one more property, and
   then no name is left.
2. Definitions that lead back to themselves without an end: an output would open one object in another for ever.
"""

import functools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pagoda.engine.grammars.llguidance_backend import compile_grammar
from pagoda.engine.grammars.schema_size import MAX_PATTERN_CHARS, iter_values

_MAX_STEPS = 1500
"""Bytes of names that are compared with the patterns of one schema; each takes 20 to 500 µs."""


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

    @property
    def is_exhausted(self) -> bool:
        return self._num_steps > _MAX_STEPS

    def matched_only(self, pattern: str) -> list[str] | None:
        """Return the listed names that a pattern matches if it matches no other string, None otherwise.

        The library itself is followed along the names, so the answer holds for the grammar that it makes of the
        pattern. None also for a pattern that it refuses.
        """
        if len(pattern) > MAX_PATTERN_CHARS:
            return None
        schema = json.dumps({"type": "string", "pattern": pattern})
        matcher = compile_grammar(_byte_tokenizer(), f"start: %json {schema}")
        if matcher.get_error():
            return [] if "Unsatisfiable" in matcher.get_error() else None
        found: list[str] = []
        todo = [(matcher, 0, list(self._texts))]
        while todo:
            matcher, depth, texts = todo.pop()
            self._num_steps += 1 + len(pattern) // 64  # a step takes longer in a long expression
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


def endless(defs: dict[str, Any]) -> set[str]:
    """Return the names of definitions that no finite value satisfies, as far as their references decide about it.

    defs: rewritten schemas by what `$ref` calls them.
    """
    left, finite = list(defs), set[str]()
    num_before = -1
    while len(finite) > num_before:
        num_before = len(finite)
        left.reverse()  # a chain of references, in either order, so takes two rounds at most
        for name in left:
            if _can_end(defs[name], finite, None):
                finite.add(name)
        left = [name for name in left if name not in finite]
    return set(left)


def _can_end(schema: Any, finite: set[str], kind: Any) -> bool:
    """kind: the `type` that applies to the same value, if one is known."""
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type", kind)
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    for name, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(name)
        if isinstance(parts, list) and parts and not combine(_can_end(one, finite, kind) for one in parts):
            return False
    return all(_can_end(one, finite, None) for one in _needed(schema, kind))


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
