"""Negation and disjointness of JSON schemas, as far as they can be written with the keywords that are supported."""

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any] | bool
Lookup = Callable[[str], Schema | None]
"""From a rewritten `$ref` to its schema."""

ALL_TYPES = ("null", "boolean", "object", "array", "number", "string")
_MAX_DEPTH = 12
_INT = int | float


def types_of(schema: Schema) -> set[str]:
    """Return the JSON types that the schema's own keywords allow; "integer" only next to no "number"."""
    if isinstance(schema, bool):
        return set(ALL_TYPES) if schema else set()
    allowed = {*ALL_TYPES, "integer"}
    if "type" in schema:
        given = schema["type"]
        allowed = {given} if isinstance(given, str) else set(given)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            of_values = {_type_of(value) for value in values}
            allowed = {one for one in of_values if one in allowed or (one == "integer" and "number" in allowed)}
    if "number" in allowed:
        allowed.discard("integer")
    return allowed


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, _INT):
        return "integer" if value == int(value) else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, but is not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return a == b and type(a) in (int, float) if isinstance(b, _INT) else type(a) is type(b) and a == b


def values_of(schema: Schema) -> list[Any] | None:
    """Return the values that `const` or `enum` list, or None if the schema has neither."""
    if isinstance(schema, bool):
        return None if schema else []
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def common_keywords(a: Schema, b: Schema) -> Schema:
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


class SchemaLogic:
    """Works on rewritten schemas. `context` is a schema that the value satisfies too: it helps to list values."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    # ---- negation

    def negate(self, schema: Schema, context: Schema = True, depth: int = 0) -> Schema | None:
        """Return the schema of exactly the values (of `context`) that `schema` does not allow; None if not writable."""
        if isinstance(schema, bool):
            return not schema
        if depth > _MAX_DEPTH:
            return None
        branches: list[Schema] = []
        for name, value in schema.items():
            negated = self._negate_keyword(name, value, context, depth)
            if negated is None:
                return None
            if negated is not False:
                branches.append(negated)
        if not branches:
            return False
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _negate_keyword(self, name: str, value: Any, context: Schema, depth: int) -> Schema | None:
        deeper = depth + 1
        match name:
            case "type":
                return _other_types({value} if isinstance(value, str) else set(value))
            case "const":
                return self._negate_values([value], context)
            case "enum":
                return self._negate_values(value, context)
            case "required":
                absent = [{"properties": {one: False}} for one in value]
                return {"type": "object", "anyOf": absent} if absent else False
            case "properties":
                return self._negate_properties(value, context, deeper)
            case "allOf" | "anyOf":
                negated = [self.negate(one, context, deeper) for one in value]
                if any(one is None for one in negated):
                    return None
                return {"anyOf" if name == "allOf" else "allOf": negated}
            case "$ref":
                target = self._lookup(value)
                return None if target is None else self.negate(target, context, deeper)
            case _:
                return _negate_bound(name, value)

    def _negate_values(self, values: list[Any], context: Schema) -> Schema | None:
        known = values_of(context)
        if known is not None:
            left = [one for one in known if not any(same(one, value) for value in values)]
            return {"enum": left} if left else False
        types = {_type_of(value) for value in values}
        if not types <= {"null", "boolean"}:
            return None
        others = [one for one in ALL_TYPES if one not in types]
        branches: list[Schema] = [{"type": others}]
        if "boolean" in types:
            branches += [{"const": one} for one in (True, False) if not any(same(one, value) for value in values)]
        return {"anyOf": branches}

    def _negate_properties(self, properties: Mapping[str, Schema], context: Schema, depth: int) -> Schema | None:
        """Some property is there and does not match."""
        known = context.get("properties", {}) if isinstance(context, dict) else {}
        branches: list[Schema] = []
        for name, schema in properties.items():
            negated = self.negate(schema, known.get(name, True), depth)
            if negated is None:
                return None
            if negated is not False:
                branches.append({"type": "object", "required": [name], "properties": {name: negated}})
        return {"anyOf": branches} if branches else False

    # ---- disjointness

    def are_disjoint(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """Whether certainly no value matches both schemas."""
        a, b = self._followed(a), self._followed(b)
        if a is False or b is False:
            return True
        if isinstance(a, bool) or isinstance(b, bool) or depth > _MAX_DEPTH:
            return False
        mine, others = types_of(a), types_of(b)
        shared = mine & others
        if ("integer" in mine and "number" in others) or ("number" in mine and "integer" in others):
            shared.add("number")
        if not shared:
            return True
        first, second = values_of(a), values_of(b)
        if first is not None and second is not None:
            return not any(same(one, other) for one in first for other in second)
        for one, other in ((a, b), (b, a)):
            for name in ("anyOf", "oneOf"):
                if name in one and all(self.are_disjoint(part, other, depth + 1) for part in one[name]):
                    return True
            if any(self.are_disjoint(part, other, depth + 1) for part in one.get("allOf", ())):
                return True
        return shared == {"object"} and self._are_disjoint_objects(a, b, depth)

    def _followed(self, schema: Schema) -> Schema:
        """Follow references without other keywords next to them."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or set(schema) != {"$ref"}:
                break
            target = self._lookup(schema["$ref"])
            if target is None:
                break
            schema = target
        return schema

    def _are_disjoint_objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            for name in one.get("required", ()):
                mine = one.get("properties", {}).get(name, True)
                theirs = _schema_of_property(other, name)
                if theirs is False:
                    return True
                if name in other.get("required", ()) and self.are_disjoint(mine, theirs, depth + 1):
                    return True
        return False


def _schema_of_property(schema: dict[str, Any], name: str) -> Schema:
    """Return what the schema asks of a property: its own schema, or False where no such property is allowed."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
    return not closed


def _other_types(types: set[str]) -> Schema | None:
    if "integer" in types and "number" not in types:
        return None  # numbers that are not integers cannot be written
    others = [one for one in ALL_TYPES if one not in types]
    return {"type": others} if others else False


_OPPOSITE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


def _negate_bound(name: str, value: Any) -> Schema | None:
    if name not in _OPPOSITE:
        return None
    kind, opposite, step = _OPPOSITE[name]
    return False if value + step < 0 and step else {"type": kind, opposite: value + step}
