"""The JSON types that a tool's arguments may have, as a validator of its schema would see them."""

import re
from collections.abc import Mapping
from typing import Any

Types = frozenset[str]
ANY_TYPE: Types = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_STEPS = 20_000  # tens of milliseconds, for all tools of a request together
_MAX_DEPTH = 64
_OTHER = "\ud800"  # an argument that no schema lists: a body's strings are Unicode
_INDEX = re.compile("[0-9]{1,9}")


def type_of(value: object) -> str:
    """Return the JSON type of a parsed value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds: dict[type[Any], str] = {str: "string", int: "integer", float: "number", list: "array"}
    return kinds.get(type(value), "object")


class ArgumentTypes:
    """The types of one tool's arguments, worked out when this is made: that takes time, parsing an answer must not.

    schema: that of the object of all arguments, with its definitions.
    max_steps: how many of its schemas are looked at, the same one for each argument anew. Arguments that this does not
    suffice for may have all types, and so may what is nested or referred to too deeply.   num_steps: those taken.
    """

    def __init__(self, schema: Any, max_steps: int = MAX_STEPS) -> None:
        self.num_steps = 0
        self._max_steps = max_steps
        self._schema = schema
        self._names: dict[str, None] = {}  # of the arguments that the schema lists
        self._found: dict[tuple[int, str | None], Types] = {}  # by the schema's id
        self._others = self._types(schema, _OTHER, 0) or ANY_TYPE
        self._by_name: dict[str, Types] = {}
        for name in self._names:
            types = self._types(schema, name, 0) or ANY_TYPE
            if self.num_steps >= max_steps:
                self._others = ANY_TYPE
                break
            self._by_name[name] = types
        self._found.clear()

    def of(self, name: str) -> Types:
        """Return the types that an argument may have; all, if the schema says nothing or allows none."""
        return self._by_name.get(name, self._others)

    def _types(self, schema: Any, name: str | None, depth: int) -> Types:
        """Return the types of what the schema describes, or of its property `name`."""
        self.num_steps += 1
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False and name is None else ANY_TYPE
        key = (id(schema), name)
        if key not in self._found:
            if depth > _MAX_DEPTH or self.num_steps >= self._max_steps:
                return ANY_TYPE
            self._found[key] = ANY_TYPE  # of a reference to itself
            self._found[key] = self._combined(schema, name, depth + 1)
        return self._found[key]

    def _combined(self, schema: Mapping[str, Any], name: str | None, depth: int) -> Types:
        found = self._of_property(schema, name, depth) if name is not None else _own_types(schema)
        if isinstance(ref := schema.get("$ref"), str):
            found &= self._types(self._target(ref), name, depth)
        for part in _schemas(schema.get("allOf")):
            found &= self._types(part, name, depth)
        for keyword in ("anyOf", "oneOf"):
            if parts := _schemas(schema.get(keyword)):
                found &= frozenset[str]().union(*(self._types(part, name, depth) for part in parts))
        return found

    def _of_property(self, schema: Mapping[str, Any], name: str, depth: int) -> Types:
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            if name == _OTHER:
                self._names |= dict.fromkeys(properties)
            if name in properties:
                return self._types(properties[name], None, depth)
        others = schema.get("additionalProperties")
        is_said = isinstance(others, Mapping) and "patternProperties" not in schema
        return self._types(others, None, depth) if is_said else ANY_TYPE

    def _target(self, ref: str) -> Any:
        """Return what a JSON pointer of this schema points to; True, which allows all, if there is no such place."""
        if not ref.startswith("#"):
            return True
        place = self._schema
        for step in ref[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping) and step in place:
                place = place[step]
            elif isinstance(place, list) and _INDEX.fullmatch(step) is not None and int(step) < len(place):
                place = place[int(step)]
            else:
                return True
        return place


ANY_ARGUMENTS = ArgumentTypes(True)


def argument_types(schemas: Mapping[str, Any]) -> dict[str, ArgumentTypes]:
    """Return the types of each tool's arguments.   schemas: of the object of its arguments, by tool."""
    types: dict[str, ArgumentTypes] = {}
    num_left = MAX_STEPS
    for tool, schema in schemas.items():
        types[tool] = ArgumentTypes(schema, num_left)
        num_left -= types[tool].num_steps
    return types


def _own_types(schema: Mapping[str, Any]) -> Types:
    found = ANY_TYPE
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
