"""The JSON types that a tool's arguments may have, as a validator of its schema would see them."""

from collections.abc import Mapping
from typing import Any

Types = frozenset[str]
_ALL: Types = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def type_of(value: object) -> str:
    """Return the JSON type of a parsed value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array"}
    return kinds.get(type(value), "object")


class ArgumentTypes:
    """The types of one tool's arguments.   schema: that of the object of all arguments, with its definitions."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._by_ref: dict[tuple[str, str | None], Types] = {}

    def of(self, name: str) -> Types:
        """Return the types that an argument may have; all, if the schema says nothing or allows none."""
        return self._types(self._schema, name) or _ALL

    def _types(self, schema: Any, name: str | None) -> Types:
        """Return the types of what the schema describes, or of its property `name`."""
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False and name is None else _ALL
        found = self._of_property(schema, name) if name is not None else _own_types(schema)
        if isinstance(ref := schema.get("$ref"), str):
            found &= self._referenced(ref, name)
        for part in _schemas(schema.get("allOf")):
            found &= self._types(part, name)
        for keyword in ("anyOf", "oneOf"):
            if parts := _schemas(schema.get(keyword)):
                found &= frozenset[str]().union(*(self._types(part, name) for part in parts))
        return found

    def _of_property(self, schema: Mapping[str, Any], name: str) -> Types:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return self._types(properties[name], None)
        others = schema.get("additionalProperties")
        return self._types(others, None) if isinstance(others, Mapping) and "patternProperties" not in schema else _ALL

    def _referenced(self, ref: str, name: str | None) -> Types:
        if (ref, name) not in self._by_ref:
            self._by_ref[ref, name] = _ALL  # of a reference to itself
            self._by_ref[ref, name] = self._types(self._target(ref), name)
        return self._by_ref[ref, name]

    def _target(self, ref: str) -> Any:
        """Return what a JSON pointer of this schema points to; True, which allows all, if there is no such place."""
        if not ref.startswith("#"):
            return True
        place = self._schema
        for step in ref[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping) and step in place:
                place = place[step]
            elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
                place = place[int(step)]
            else:
                return True
        return place


def _own_types(schema: Mapping[str, Any]) -> Types:
    found = _ALL
    stated = schema.get("type")
    if named := [one for one in (stated if isinstance(stated, list) else [stated]) if isinstance(one, str)]:
        found &= frozenset(named)
        found |= {"integer"} if "number" in named else set()
        found |= {"null"} if schema.get("nullable") is True else set()
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        found &= frozenset(map(type_of, values))
    return found


def _schemas(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
