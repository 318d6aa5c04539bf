"""SchemaSize: how much work a schema is for the grammar library, found without doing it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_PARTS = 4096
TOO_LARGE = f"the schema is too large: more than {MAX_PARTS} schemas and values, counted as often as they apply"
MAX_PATTERNS = 8
MAX_REFERENCE_DEPTH = 200
MAX_PATTERN_CHARS = 4096
_CHARS_PER_PART = 32
_PAIRS_PER_PART = {"properties": 500, "patternProperties": 2}  # the library compares each name with the others
_MULTIPLE_PER_PART = 10
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "const", "enum"})
_SAY_NOTHING = frozenset({"title", "description", "$comment", "deprecated", "readOnly", "writeOnly", "discriminator"})


def iter_values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it, and the names of its properties."""
    todo = [value]
    while todo:
        one = todo.pop()
        yield one
        if isinstance(one, dict):
            todo += one
            todo += one.values()
        elif isinstance(one, list):
            todo += one


@dataclass(frozen=True, slots=True)
class _Work:
    """parts: schemas and values, as often as the library copies them.   patterns: that one string must match."""

    parts: int
    patterns: int = 0


class SchemaSize:
    """The size of a rewritten schema.

    The library merges schemas that apply to the same value, and copies what `$ref` names where it is merged; a few
    references may so become millions of copies. Strings that must match several patterns take time that is exponential
    in their number.

    num_parts: schemas and values, as often as the library copies them; known after `excess`.
    """

    def __init__(self, root: Any, defs: dict[str, Any]) -> None:
        """root, defs: as json_schema.py writes them. A reference is `#` or `#/$defs/NAME`."""
        self._root = root
        self._defs = defs
        self.num_parts = 0
        self._known: dict[tuple[int, bool], _Work] = {}
        self._longest_pattern = 0
        self._open: set[int] = set()  # schemas with additionalProperties, merged with others
        self._patterned: set[int] = set()  # schemas with patternProperties, merged with others

    def excess(self) -> str:
        """Return why the schema is not supported, "" if it is."""
        try:
            works = [self._measure(one, False, 0) for one in (self._root, *self._defs.values())]
        except RecursionError:
            return f"references are nested more than {MAX_REFERENCE_DEPTH} deep"
        self.num_parts = sum(work.parts for work in works)
        if self.num_parts > MAX_PARTS:
            return TOO_LARGE
        if max(work.patterns for work in works) > MAX_PATTERNS:
            return f"more than {MAX_PATTERNS} patterns for one string are not supported"
        if self._longest_pattern > MAX_PATTERN_CHARS:
            return f"a pattern of more than {MAX_PATTERN_CHARS} characters is not supported"
        if self._patterned and self._open | self._patterned != self._patterned & self._open and self._open:
            return "additionalProperties does not apply to the patternProperties of another schema; write them together"
        return ""

    def _measure(self, schema: Any, is_merged: bool, depth: int) -> _Work:
        """is_merged: it applies to a value together with another schema."""
        if not isinstance(schema, dict):
            return _Work(1)
        if depth > MAX_REFERENCE_DEPTH:
            raise RecursionError
        key = (id(schema), is_merged)
        if key not in self._known:
            self._known[key] = _Work(1)  # for references to itself, on the way
            self._known[key] = self._measure_new(schema, is_merged, depth)
        return self._known[key]

    def _measure_new(self, schema: dict[str, Any], is_merged: bool, depth: int) -> _Work:
        said = schema.keys() - _SAY_NOTHING
        is_merged = is_merged or (len(said) > 1 and bool(_COMBINING & said)) or "allOf" in said
        if is_merged and "patternProperties" in said:
            self._patterned.add(id(schema))
        if is_merged and schema.get("additionalProperties", True) not in (True, {}):
            self._open.add(id(schema))
        parts = 1 + sum(len(name) // _CHARS_PER_PART for name in said)
        patterns = int("pattern" in said) + int("format" in said)
        own = [schema.get("pattern"), *_keys(schema.get("patternProperties"))]
        self._longest_pattern = max([self._longest_pattern, *(len(one) for one in own if isinstance(one, str))])
        inside = 0  # patterns of a value inside this one
        for name, value in schema.items():
            if name in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
                works = [self._measure(one, is_merged, depth + 1) for one in value]
                parts += sum(work.parts for work in works)
                patterns += (sum if name == "allOf" else max)([0, *(work.patterns for work in works)])
            elif name == "$ref":
                work = self._measure(self._target(value), is_merged, depth + 1)
                parts += work.parts if is_merged else 1
                patterns += work.patterns
            elif name in ("properties", "patternProperties") and isinstance(value, dict):
                works = [self._measure(one, is_merged, depth + 1) for one in value.values()]
                parts += sum(work.parts for work in works) + sum(len(key) // _CHARS_PER_PART for key in value)
                parts += len(value) ** 2 // _PAIRS_PER_PART[name]
                inside = max([inside, *(work.patterns for work in works)])
            elif name in ("items", "additionalProperties") or (name == "prefixItems" and isinstance(value, list)):
                items = value if isinstance(value, list) else [value]
                works = [self._measure(one, is_merged, depth + 1) for one in items]
                parts += sum(work.parts for work in works)
                inside = max([inside, *(work.patterns for work in works)])
            elif name == "multipleOf" and isinstance(value, int | float):
                parts += int(min(value, MAX_PARTS * _MULTIPLE_PER_PART)) // _MULTIPLE_PER_PART
            else:
                parts += sum(
                    1 + (len(one) // _CHARS_PER_PART if isinstance(one, str) else 0) for one in iter_values(value)
                )
        return _Work(min(parts, MAX_PARTS + 1), max(patterns, inside))

    def _target(self, reference: str) -> Any:
        return self._root if reference == "#" else self._defs[reference.removeprefix("#/$defs/")]


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []
