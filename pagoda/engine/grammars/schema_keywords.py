"""Rewrite the keywords of a JSON schema, one function each. It gets the place, and the keyword's name."""

from collections.abc import Callable, Mapping

from pagoda.engine.grammars.schema_formats import FORMAT_PATTERNS, KNOWN_FORMATS, UNSUPPORTED_FORMATS
from pagoda.engine.grammars.schema_logic import common_keywords, types_of
from pagoda.engine.grammars.schema_place import SchemaPlace

Keyword = Callable[[SchemaPlace, str], None]

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_NO_STRING = {"type": ["null", "boolean", "object", "array", "number"]}
_NO_ARRAY = {"type": ["null", "boolean", "object", "number", "string"]}
_COMBINE_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies"})


# ---- keywords that stay as they are, if their values are right


def _type(place: SchemaPlace, name: str) -> None:
    value = place.given[name]
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or not types or not all(one in _TYPES for one in types):
        raise place.refuse(name, f"must be one of {', '.join(sorted(_TYPES))}, or a list of them")
    place.out[name] = value


def _required(place: SchemaPlace, name: str) -> None:
    value = place.given[name]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise place.refuse(name, "must be a list of strings")
    place.out[name] = value


def _pattern(place: SchemaPlace, name: str) -> None:
    if not isinstance(place.given[name], str):
        raise place.refuse(name, "must be a string")
    place.out[name] = place.given[name]


def _enum(place: SchemaPlace, name: str) -> None:
    if not isinstance(place.given[name], list) or not place.given[name]:
        raise place.refuse(name, "must be a list of at least one value")
    place.out[name] = place.given[name]


def _const(place: SchemaPlace, name: str) -> None:
    place.out[name] = place.given[name]


def _bound(place: SchemaPlace, name: str) -> None:
    value = place.given[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.refuse(name, "must be a number")
    place.out[name] = value


def _exclusive_bound(place: SchemaPlace, name: str) -> None:
    if not isinstance(place.given[name], bool):
        return _bound(place, name)
    bound = place.given.get(name.removeprefix("exclusive").lower())  # draft 4: a flag next to the bound
    if place.given[name] and bound is not None:
        place.out[name] = bound
    return None


def _multiple_of(place: SchemaPlace, name: str) -> None:
    _bound(place, name)
    if place.out[name] <= 0:
        raise place.refuse(name, "must be a number above 0")


def _count(place: SchemaPlace, name: str) -> None:
    _bound(place, name)
    value = place.out[name]
    if value != int(value) or value < 0:
        raise place.refuse(name, "must be an integer of at least 0")
    place.out[name] = int(value)


def _min_properties(place: SchemaPlace, name: str) -> None:
    """Refuse a count that only several unlisted names reach.

    A grammar writes listed properties once each, but may write any other name twice, and readers of JSON count it once.
    """
    _count(place, name)
    required = place.given.get("required", [])
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = place.given.get("additionalProperties", True) is not False or "patternProperties" in place.given
    if is_open and place.out[name] > num_required + 1:
        most = f"more than {num_required + 1}, one above the number of required properties,"
        raise place.refuse(name, f"{most} is only supported with additionalProperties: false")


# ---- keywords with schemas in them


def _properties(place: SchemaPlace, name: str) -> None:
    place.out[name] = place.sub_map(name)


def _additional_properties(place: SchemaPlace, name: str) -> None:
    if name not in place.out:  # propertyNames may have moved it
        place.out[name] = place.sub(place.given[name], name)


def _prefix_items(place: SchemaPlace, name: str) -> None:
    if not isinstance(place.given.get("items"), list):
        place.out[name] = place.sub_list(name)


def _items(place: SchemaPlace, name: str) -> None:
    items = place.given[name]
    if not isinstance(items, list):
        place.out[name] = place.sub(items, name)
        return
    if items:  # before draft 2020-12
        place.out["prefixItems"] = place.sub_list(name)
    place.out[name] = place.sub(place.given.get("additionalItems", True), "additionalItems")


def _any_of(place: SchemaPlace, name: str) -> None:
    place.out[name] = place.sub_list(name, common_keywords(True, place.given))


def _ref(place: SchemaPlace, name: str) -> None:
    reference = place.given[name]
    if not isinstance(reference, str):
        raise place.refuse(name, "must be a string")
    found = place.rewriter.refer(reference, place.at, place.depth)
    if found is None:
        raise place.refuse(name, f"{reference!r:.100} is not in this document; external schemas are not fetched")
    place.out[name] = found


def _format(place: SchemaPlace, name: str) -> None:
    value = place.given[name]
    if value in KNOWN_FORMATS:
        place.out[name] = value
    elif value in FORMAT_PATTERNS:
        place.more.append({"anyOf": [{"type": "string", "pattern": FORMAT_PATTERNS[value]}, _NO_STRING]})
    elif value in UNSUPPORTED_FORMATS:
        raise place.refuse(name, f"the format {value!r} is not supported")
    # Any other format is an annotation, as JSON Schema says of names that it does not define.


def _unique_items(place: SchemaPlace, name: str) -> None:
    if place.given[name] is not False and place.given.get("maxItems", 2) > 1:
        raise place.refuse(name, "is not supported for arrays of more than one item")


def _contains(place: SchemaPlace, name: str) -> None:
    least, most = place.given.get("minContains", 1), place.given.get("maxContains")
    wanted = place.sub(place.given[name], name)
    if most is None and least == 0:
        return
    if wanted is True or wanted == {}:
        bounds = {"minItems": least} | ({} if most is None else {"maxItems": most})
        place.more.append({"anyOf": [{"type": "array", **bounds}, _NO_ARRAY]})
        return
    raise place.refuse(name, "is not supported")


def _property_names(place: SchemaPlace, name: str) -> None:
    names = place.sub(place.given[name], name)
    if names is True or (isinstance(names, dict) and set(names) <= {"type"} and "string" in types_of(names)):
        return
    listed = set(place.given) & {"properties", "patternProperties", "required"}
    others = place.sub(place.given.get("additionalProperties", True), "additionalProperties")
    if isinstance(names, dict) and not listed and set(names) <= {"type", "pattern"} and "pattern" in names:
        place.out["patternProperties"] = {names["pattern"]: others}
    elif isinstance(names, dict) and not listed and set(names) <= {"type", "enum"} and "enum" in names:
        place.out["properties"] = {key: others for key in names["enum"] if isinstance(key, str)}
    else:
        raise place.refuse(name, "is only supported as a pattern or a list of names, without other properties")
    place.out["additionalProperties"] = False


def _unevaluated(place: SchemaPlace, name: str) -> None:
    plain = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}[name]
    if place.given[name] is True or plain in place.given:
        return
    if _COMBINE_SCHEMAS & set(place.given):
        raise place.refuse(name, "is not supported next to keywords that combine schemas")
    place.out[plain] = place.sub(place.given[name], name)


def _dynamic_ref(place: SchemaPlace, name: str) -> None:
    raise place.refuse(name, "is not supported; use $ref")


KEYWORDS: Mapping[str, Keyword] = {
    "type": _type,
    "required": _required,
    "pattern": _pattern,
    "const": _const,
    "enum": _enum,
    "minimum": _bound,
    "maximum": _bound,
    "exclusiveMinimum": _exclusive_bound,
    "exclusiveMaximum": _exclusive_bound,
    "multipleOf": _multiple_of,
    "minLength": _count,
    "maxLength": _count,
    "minItems": _count,
    "maxItems": _count,
    "minProperties": _min_properties,
    "maxProperties": _count,
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _additional_properties,
    "items": _items,
    "prefixItems": _prefix_items,
    "anyOf": _any_of,
    "$ref": _ref,
    "format": _format,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated,
    "unevaluatedItems": _unevaluated,
    "$dynamicRef": _dynamic_ref,
    "$recursiveRef": _dynamic_ref,
}
"""What rewrites each keyword, in any order. Those of schema_conditions.py come afterwards."""
