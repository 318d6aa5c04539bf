"""Rewrite a JSON schema into an equivalent one with the keywords that the grammar library supports.

Only equivalent rewritings are made: `definitions`, anchors and ids become `$defs`, draft 4's forms become today's,
conditions become alternatives where their negation can be written. Keywords that JSON Schema does not know, and
annotations, are dropped. Everything else is refused with the JSON pointer of the place.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.engine.grammars.schema_conditions import CONDITIONS
from pagoda.engine.grammars.schema_keywords import KEYWORDS
from pagoda.engine.grammars.schema_logic import Schema, SchemaLogic, common_keywords
from pagoda.engine.grammars.schema_place import SchemaPlace
from pagoda.engine.grammars.schema_refs import SchemaRefs

MAX_DEPTH = 64


@dataclass(slots=True)
class RewrittenSchema:
    """schema: for the grammar library.

    places: id of each dict in it -> the JSON pointer of the caller's schema that it comes from.
    uncertain: pointers of keywords that only the library can accept or refuse.
    """

    schema: Schema
    places: dict[int, str] = field(default_factory=dict)
    uncertain: list[str] = field(default_factory=list)


def parse_schema(text: str, field_name: str) -> Any:
    """Parse a schema's text. Raises RequestError for what is not JSON, and not an object or a boolean."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field_name} is not valid JSON: {str(error)[:200]}", field_name) from None
    if not isinstance(value, dict | bool):
        raise RequestError(f"{field_name} must be a JSON object, not {type(value).__name__}", field_name)
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def rewrite_schema(schema: Any, field_name: str, close_objects: bool = False) -> RewrittenSchema:
    """Rewrite a parsed schema. Raises RequestError with the pointer of what is not supported.

    field_name: the request's field, for errors.   close_objects: objects with properties, and no
    `additionalProperties` of their own, take no others.
    """
    return _Rewriter(schema, field_name, close_objects).run()


class _Rewriter:
    """Rewrites one document. A schema_place.Rewriter."""

    def __init__(self, root: Any, field_name: str, close_objects: bool) -> None:
        self.logic = SchemaLogic(self._look_up)
        self.uncertain: list[str] = []
        self._root = root
        self._field = field_name
        self._closes = close_objects
        self._refs = SchemaRefs(root)
        self._names: dict[str, str] = {}  # pointer of a target of $ref -> its name in $defs
        self._defs: dict[str, Schema] = {}
        self._places: dict[int, str] = {}
        self._kept: list[Schema] = []  # keeps the ids in `places` valid

    def run(self) -> RewrittenSchema:
        schema = self.rewrite(self._root, "", True, 0)
        if self._defs and isinstance(schema, dict):
            schema = {**schema, "$defs": self._defs}
            self._places[id(schema)] = ""
        self._kept.append(schema)
        return RewrittenSchema(schema, self._places, self.uncertain)

    def refuse(self, at: str, why: str) -> RequestError:
        return RequestError(f"{self._field}: at {at or '/'}: {why}", self._field)

    def rewrite(self, schema: Any, at: str, context: Schema, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.refuse(at, f"a schema is an object or a boolean, not {type(schema).__name__}")
        if depth > MAX_DEPTH:
            raise self.refuse(at, f"schemas are nested more than {MAX_DEPTH} deep")
        place = SchemaPlace(self, schema, at, depth, context)
        for name in schema:
            if name in KEYWORDS:
                KEYWORDS[name](place, name)
        if self._closes and "properties" in place.out and "additionalProperties" not in place.out:
            place.out["additionalProperties"] = False
        place.context = common_keywords(context, place.out)
        for name in CONDITIONS:
            if name in schema:
                CONDITIONS[name](place, name)
        if place.more:
            place.out["allOf"] = [*place.out.get("allOf", ()), *place.more]
        self._places[id(place.out)] = at
        self._kept.append(place.out)
        return place.out

    def refer(self, reference: str, at: str, depth: int) -> str | None:
        found = self._refs.find(reference, at)
        if found is None:
            return None
        pointer, target = found
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._defs[name] = True  # while it is rewritten: it may refer to itself
            self._defs[name] = self.rewrite(target, pointer, True, depth + 1)
        return f"#/$defs/{self._names[pointer]}"

    def _look_up(self, reference: str) -> Schema | None:
        return self._defs.get(reference.removeprefix("#/$defs/"))
