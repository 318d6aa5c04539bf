"""Rewrite a JSON schema into an equivalent one with the keywords that the grammar library supports.

Only equivalent rewritings are made: `definitions`, anchors and ids become `$defs`, draft 4's forms become today's,
conditions become alternatives where their negation can be written. Keywords that JSON Schema does not know, and
annotations, are dropped. Everything else is refused with the JSON pointer of the place.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.engine.grammars.schema_formats import FORMAT_PATTERNS, KNOWN_FORMATS, UNSUPPORTED_FORMATS
from pagoda.engine.grammars.schema_logic import Schema, SchemaLogic, types_of
from pagoda.engine.grammars.schema_refs import SchemaRefs, escape

MAX_DEPTH = 64
_MAX_ONE_OF = 8  # alternatives that are distinguished by negations, whose number is squared
_KEPT = frozenset(
    {"type", "required", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"multipleOf", "minItems", "maxItems", "minProperties", "maxProperties", "pattern"}
)
"""Keywords that stay as they are."""
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})


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
    def __init__(self, root: Any, field_name: str, close_objects: bool) -> None:
        self._root = root
        self._field = field_name
        self._closes = close_objects
        self._refs = SchemaRefs(root)
        self._names: dict[str, str] = {}  # pointer of a target of $ref -> its name in $defs
        self._defs: dict[str, Schema] = {}
        self._places: dict[int, str] = {}
        self._kept: list[Schema] = []  # keeps the ids in `places` valid
        self._uncertain: list[str] = []
        self._logic = SchemaLogic(self._look_up)

    def run(self) -> RewrittenSchema:
        schema = self._rewrite(self._root, "", True, 0)
        if self._defs and isinstance(schema, dict):
            schema = {**schema, "$defs": self._defs}
            self._places[id(schema)] = ""
        self._kept.append(schema)
        return RewrittenSchema(schema, self._places, self._uncertain)

    def _refuse(self, at: str, why: str) -> RequestError:
        return RequestError(f"{self._field}: at {at or '/'}: {why}", self._field)

    def _look_up(self, reference: str) -> Schema | None:
        return self._defs.get(reference.removeprefix("#/$defs/"))

    # ---- one schema

    def _rewrite(self, schema: Any, at: str, context: Schema, depth: int) -> Schema:
        """Return the schema at pointer `at`. context: a schema that its values satisfy too."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refuse(at, f"a schema is an object or a boolean, not {type(schema).__name__}")
        if depth > MAX_DEPTH:
            raise self._refuse(at, f"schemas are nested more than {MAX_DEPTH} deep")
        out: dict[str, Any] = {}
        more: list[Schema] = []  # to be satisfied too
        for name in schema:
            if name in _KEPT:
                self._keep(out, name, schema, at)
            elif (rewrite := _REWRITERS.get(name)) is not None:
                rewrite(self, out, more, schema, at, depth)
        if self._closes and "properties" in out and "additionalProperties" not in out:
            out["additionalProperties"] = False
        # Conditions come last: negations look at the properties and values that are allowed here.
        around = _both(context, out)
        for name in ("allOf", "if", "not", "dependencies", "dependentSchemas", "dependentRequired"):
            if name in schema:
                _CONDITIONS[name](self, more, schema, at, around, depth)
        if "oneOf" in schema:
            self._one_of(out, more, schema["oneOf"], f"{at}/oneOf", around, depth)
        if more:
            out["allOf"] = [*out.get("allOf", ()), *more]
        self._places[id(out)] = at
        self._kept.append(out)
        return out

    def _keep(self, out: dict[str, Any], name: str, schema: dict[str, Any], at: str) -> None:
        value, here = schema[name], f"{at}/{name}"
        match name:
            case "type":
                types = [value] if isinstance(value, str) else value
                if not isinstance(types, list) or not types or not all(one in _TYPES for one in types):
                    raise self._refuse(here, f"must be one of {', '.join(sorted(_TYPES))}, or a list of them")
            case "required":
                if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                    raise self._refuse(here, "must be a list of strings")
            case "pattern":
                if not isinstance(value, str):
                    raise self._refuse(here, "must be a string")
            case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(value, bool):  # draft 4
                bound = schema.get(name[9:].lower())
                if value and bound is not None:
                    out[name] = bound
                return
            case _:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise self._refuse(here, "must be a number")
                if name.startswith(("minI", "maxI", "minL", "maxL", "minP", "maxP")):
                    if value != int(value) or value < 0:
                        raise self._refuse(here, "must be an integer of at least 0")
                    value = int(value)
                elif name == "multipleOf" and value <= 0:
                    raise self._refuse(here, "must be a number above 0")
        out[name] = value

    # ---- keywords, each `(out, more, schema, at, depth)`

    def _sub(self, schema: Any, at: str, depth: int, context: Schema = True) -> Schema:
        return self._rewrite(schema, at, context, depth + 1)

    def _list(self, value: Any, at: str, depth: int, context: Schema = True) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise self._refuse(at, "must be a list of at least one schema")
        return [self._sub(one, f"{at}/{index}", depth, context) for index, one in enumerate(value)]

    def _map(self, value: Any, at: str, depth: int) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise self._refuse(at, "must be an object of schemas")
        return {name: self._sub(one, f"{at}/{escape(name)}", depth) for name, one in value.items()}

    def list_values(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        if "const" in schema:
            out["const"] = schema["const"]
        if "enum" in schema:
            if not isinstance(schema["enum"], list) or not schema["enum"]:
                raise self._refuse(f"{at}/enum", "must be a list of at least one value")
            out["enum"] = schema["enum"]

    def properties(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        for name in ("properties", "patternProperties"):
            if name in schema:
                out[name] = self._map(schema[name], f"{at}/{name}", depth)

    def additional_properties(
        self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int
    ) -> None:
        if "additionalProperties" not in out:  # propertyNames may have moved it
            out["additionalProperties"] = self._sub(schema["additionalProperties"], f"{at}/additionalProperties", depth)

    def items(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        items = schema.get("items", True)
        if isinstance(items, list):  # before draft 2020-12
            out["prefixItems"] = [self._sub(one, f"{at}/items/{i}", depth) for i, one in enumerate(items)]
            out["items"] = self._sub(schema.get("additionalItems", True), f"{at}/additionalItems", depth)
            if not items:
                del out["prefixItems"]
            return
        if "prefixItems" in schema:
            out["prefixItems"] = self._list(schema["prefixItems"], f"{at}/prefixItems", depth)
        if "items" in schema:
            out["items"] = self._sub(items, f"{at}/items", depth)

    def any_of(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        out["anyOf"] = self._list(schema["anyOf"], f"{at}/anyOf", depth, _both(True, schema))

    def ref(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        here, reference = f"{at}/$ref", schema["$ref"]
        if not isinstance(reference, str):
            raise self._refuse(here, "must be a string")
        found = self._refs.find(reference, at)
        if found is None:
            raise self._refuse(here, f"{reference!r:.100} is not in this document; external schemas are not fetched")
        pointer, target = found
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._defs[name] = True  # while it is rewritten: it may refer to itself
            self._defs[name] = self._rewrite(target, pointer, True, depth + 1)
        out["$ref"] = f"#/$defs/{self._names[pointer]}"

    def format(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        value = schema["format"]
        if value in KNOWN_FORMATS:
            out["format"] = value
        elif value in FORMAT_PATTERNS:
            more.append({"anyOf": [{"type": "string", "pattern": FORMAT_PATTERNS[value]}, _NO_STRING]})
        elif value in UNSUPPORTED_FORMATS:
            raise self._refuse(f"{at}/format", f"the format {value!r} is not supported")
        # Any other format is an annotation, as JSON Schema says of names that it does not define.

    def unique_items(
        self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int
    ) -> None:
        if schema["uniqueItems"] is not False and schema.get("maxItems", 2) > 1:
            raise self._refuse(f"{at}/uniqueItems", "is not supported for arrays of more than one item")

    def contains(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        wanted = self._sub(schema["contains"], f"{at}/contains", depth)
        if most is None and least == 0:
            return
        if wanted is True or wanted == {}:
            bounds = {"minItems": least} | ({} if most is None else {"maxItems": most})
            more.append({"anyOf": [{"type": "array", **bounds}, _NO_ARRAY]})
            return
        raise self._refuse(f"{at}/contains", "is not supported")

    def property_names(
        self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int
    ) -> None:
        names = self._sub(schema["propertyNames"], f"{at}/propertyNames", depth)
        if names is True or (isinstance(names, dict) and set(names) <= {"type"} and "string" in types_of(names)):
            return
        listed = set(schema) & {"properties", "patternProperties", "required"}
        others = self._sub(schema.get("additionalProperties", True), f"{at}/additionalProperties", depth)
        if isinstance(names, dict) and not listed and set(names) <= {"type", "pattern"} and "pattern" in names:
            out["patternProperties"] = {names["pattern"]: others}
            out["additionalProperties"] = False
        elif isinstance(names, dict) and not listed and set(names) <= {"type", "enum"} and "enum" in names:
            out["properties"] = {name: others for name in names["enum"] if isinstance(name, str)}
            out["additionalProperties"] = False
        else:
            raise self._refuse(
                f"{at}/propertyNames", "is only supported as a pattern or a list of names, without other properties"
            )

    def unevaluated(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        applicators = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies"}
        for name, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if name not in schema or schema[name] is True or plain in schema:
                continue
            if applicators & set(schema):
                raise self._refuse(f"{at}/{name}", "is not supported next to keywords that combine schemas")
            out[plain] = self._sub(schema[name], f"{at}/{name}", depth)

    def dynamic_ref(self, out: dict[str, Any], more: list[Schema], schema: dict[str, Any], at: str, depth: int) -> None:
        name = next(name for name in ("$dynamicRef", "$recursiveRef") if name in schema)
        raise self._refuse(f"{at}/{name}", "is not supported; use $ref")

    # ---- conditions, each `(more, schema, at, context, depth)`

    def all_of(self, more: list[Schema], schema: dict[str, Any], at: str, context: Schema, depth: int) -> None:
        more += self._list(schema["allOf"], f"{at}/allOf", depth, context)

    def negation(self, more: list[Schema], schema: dict[str, Any], at: str, context: Schema, depth: int) -> None:
        negated = self._negated(schema["not"], f"{at}/not", context, depth)
        if negated is not True:
            more.append(negated)

    def if_then_else(self, more: list[Schema], schema: dict[str, Any], at: str, context: Schema, depth: int) -> None:
        if "then" not in schema and "else" not in schema:
            return
        condition = self._sub(schema["if"], f"{at}/if", depth)
        then = self._sub(schema.get("then", True), f"{at}/then", depth, context)
        otherwise = self._sub(schema.get("else", True), f"{at}/else", depth, context)
        negated = self._negated(schema["if"], f"{at}/if", context, depth)
        holds = [one for one in (condition, then) if one is not True]
        fails = [one for one in (negated, otherwise) if one is not True]
        more.append({"anyOf": [{"allOf": holds} if holds else True, {"allOf": fails} if fails else True]})

    def dependencies(self, more: list[Schema], schema: dict[str, Any], at: str, context: Schema, depth: int) -> None:
        for keyword in ("dependencies", "dependentSchemas", "dependentRequired"):
            value = schema.get(keyword, {})
            if not isinstance(value, dict):
                raise self._refuse(f"{at}/{keyword}", "must be an object")
            for name, needed in value.items():
                here = f"{at}/{keyword}/{escape(name)}"
                if isinstance(needed, str):  # draft 3
                    needed = [needed]
                if isinstance(needed, list):
                    wanted: Schema = {"required": [name, *needed]} if needed else True
                else:
                    wanted = self._sub(needed, here, depth, context)
                if wanted is not True:
                    more.append({"anyOf": [{"properties": {name: False}}, wanted]})

    def _negated(self, schema: Any, at: str, context: Schema, depth: int) -> Schema:
        if isinstance(schema, dict) and "not" in schema and len(schema) == 1:
            return self._sub(schema["not"], f"{at}/not", depth, context)
        negated = self._logic.negate(self._sub(schema, at, depth), context)
        if negated is None:
            raise self._refuse(at, "its negation cannot be written with the supported keywords")
        return negated

    def _one_of(
        self, out: dict[str, Any], more: list[Schema], value: Any, at: str, context: Schema, depth: int
    ) -> None:
        """Write `oneOf` as `anyOf`: alternatives that overlap are given each other's negations."""
        parts = self._list(value, at, depth, context)
        whole = [_both(context, part) for part in parts]
        overlaps = {
            (i, j)
            for i in range(len(parts))
            for j in range(len(parts))
            if i != j and not self._logic.are_disjoint(whole[i], whole[j])
        }
        alternatives: list[Schema] = []
        for i, part in enumerate(parts):
            others = [self._logic.negate(parts[j], context) for j in range(len(parts)) if (i, j) in overlaps]
            if any(one is None for one in others) or (others and len(parts) > _MAX_ONE_OF):
                self._uncertain.append(at)
                out["oneOf"] = parts
                return
            alternatives.append({"allOf": [part, *(one for one in others if one is not None)]} if others else part)
        if "anyOf" in out:
            more.append({"anyOf": alternatives})
        else:
            out["anyOf"] = alternatives


def _both(a: Schema, b: Schema) -> Schema:
    """Return keywords that hold of values of both schemas: enough for `SchemaLogic`, not their intersection."""
    if isinstance(a, bool) or isinstance(b, bool):
        return b if a is True else a
    merged = {name: value for name, value in {**a, **b}.items() if name in ("type", "const", "enum")}
    merged["properties"] = {**a.get("properties", {}), **b.get("properties", {})}
    merged["required"] = [*a.get("required", ()), *b.get("required", ())]
    if "additionalProperties" in b:
        merged["additionalProperties"] = b["additionalProperties"]
        merged["patternProperties"] = b.get("patternProperties", {})
        merged["properties"] = b.get("properties", {})
    for name in ("$ref", "allOf", "anyOf", "oneOf"):
        if name in b and not any(one in a for one in ("$ref", "allOf", "anyOf", "oneOf")):
            merged[name] = b[name]
    return merged


_NO_STRING = {"type": ["null", "boolean", "object", "array", "number"]}
_NO_ARRAY = {"type": ["null", "boolean", "object", "number", "string"]}
_Keyword = Callable[[_Rewriter, dict[str, Any], list[Schema], dict[str, Any], str, int], None]
_Condition = Callable[[_Rewriter, list[Schema], dict[str, Any], str, Schema, int], None]
_REWRITERS: dict[str, _Keyword] = {
    "const": _Rewriter.list_values,
    "enum": _Rewriter.list_values,
    "properties": _Rewriter.properties,
    "patternProperties": _Rewriter.properties,
    "additionalProperties": _Rewriter.additional_properties,
    "items": _Rewriter.items,
    "prefixItems": _Rewriter.items,
    "anyOf": _Rewriter.any_of,
    "$ref": _Rewriter.ref,
    "format": _Rewriter.format,
    "uniqueItems": _Rewriter.unique_items,
    "contains": _Rewriter.contains,
    "propertyNames": _Rewriter.property_names,
    "unevaluatedProperties": _Rewriter.unevaluated,
    "unevaluatedItems": _Rewriter.unevaluated,
    "$dynamicRef": _Rewriter.dynamic_ref,
    "$recursiveRef": _Rewriter.dynamic_ref,
}
_CONDITIONS: dict[str, _Condition] = {
    "allOf": _Rewriter.all_of,
    "if": _Rewriter.if_then_else,
    "not": _Rewriter.negation,
    "dependencies": _Rewriter.dependencies,
    "dependentSchemas": _Rewriter.dependencies,
    "dependentRequired": _Rewriter.dependencies,
}
