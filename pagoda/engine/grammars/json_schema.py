"""JSON schemas on their way to the grammar library, which decides what it supports.

A schema is rewritten only where the library reads another form: what `$ref` names moves into `$defs`, draft 4's forms
become today's, and formats that JSON Schema does not define are dropped, as are annotations. Refused, with the JSON
pointer of the place, are keywords that the library would ignore or get wrong, and schemas so large that compiling them
would take more than about a second; all in time linear in the schema's size.
"""

import contextlib
import json
import math
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from pagoda.base.errors import RequestError
from pagoda.engine.grammars.dead_ends import ListedNames, endless
from pagoda.engine.grammars.schema_refs import SchemaRefs
from pagoda.engine.grammars.schema_size import MAX_PARTS, TOO_LARGE, SchemaSize, iter_values

Schema = dict[str, Any] | bool

MAX_DEPTH = 100
_MAX_EXACT = 2**53  # the library's numbers are floats
_MAX_MULTIPLE = 10_000  # a grammar has a state for each remainder
_MAX_POINTER_CHARS = 200
_MAX_TAGS = 8  # properties that are tried as the one that distinguishes alternatives
_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains"}
    | {"maxContains", "uniqueItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"}
    | {"$recursiveRef", "extends", "disallow", "divisibleBy"}
)
"""Keywords of any draft that restrict values and that the library does not support; it would ignore some of them."""
_NO_EFFECT = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
_DROPPED = frozenset({"$schema", "$id", "id", "$anchor", "$defs", "definitions", "x-guidance", "default", "examples"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_SAFE_WHEN_HUGE = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}
"""The sign of a bound that may be rounded: beyond the integers of 64 bits the library's own limit is tighter."""
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
    | {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"}
)
"""Formats that go to the library as they are; it refuses those of the second row."""
_UNRESERVED, _SUB_DELIMS = r"A-Za-z0-9\-._~", r"!$&'()*+,;="
_PCHAR = rf"([{_UNRESERVED}{_SUB_DELIMS}:@]|%[0-9A-Fa-f]{{2}})"
_SEGMENT_NO_COLON = rf"([{_UNRESERVED}{_SUB_DELIMS}@]|%[0-9A-Fa-f]{{2}})+"
_AUTHORITY = rf"([{_UNRESERVED}{_SUB_DELIMS}:@\[\]]|%[0-9A-Fa-f]{{2}})*"
FORMAT_PATTERNS = {
    # RFC 3986: a URI, or a relative reference whose first segment has no colon.
    "uri-reference": (
        rf"^([A-Za-z][A-Za-z0-9+.\-]*:(//{_AUTHORITY}(/{_PCHAR}*)*|/?({_PCHAR}+(/{_PCHAR}*)*)?)"
        rf"|//{_AUTHORITY}(/{_PCHAR}*)*|/({_PCHAR}+(/{_PCHAR}*)*)?|({_SEGMENT_NO_COLON}(/{_PCHAR}*)*)?)"
        rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?$"
    ),
    "json-pointer": r"^(/([^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$",
    # RFC 6570: literals, and expressions of variables.
    "uri-template": (
        r"^([!#$&(-;=?-\[\]_a-z~]|[^\x00-\x7f]|%[0-9A-Fa-f]{2}|\{[+#./;?&=,!@|]?"
        r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})([A-Za-z0-9_.]|%[0-9A-Fa-f]{2})*(:[1-9][0-9]{0,3}|\*)?"
        r"(,([A-Za-z0-9_]|%[0-9A-Fa-f]{2})([A-Za-z0-9_.]|%[0-9A-Fa-f]{2})*(:[1-9][0-9]{0,3}|\*)?)*\})*$"
    ),
}


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


def rewrite_schema(schema: Any, field_name: str, close_objects: bool = False) -> Schema:
    """Return a parsed schema as the library takes it. Raises RequestError with the pointer of what is refused.

    field_name: the request's field, for errors.   close_objects: objects with properties, and no
    `additionalProperties` of their own, take no others.
    """
    return _Rewriter(schema, field_name, close_objects).run()


def rewrite_properties(schema: dict[str, Any], field_name: str) -> dict[str, Schema]:
    """Return the properties of a parsed schema, each as the library takes it on its own: with the `$defs` it needs.

    Raises RequestError like `rewrite_schema`, and if the properties are too large together: what several refer to
    counts for each of them.
    """
    return _Rewriter(schema, field_name, False, names_root=True).run_on_properties()


class _Rewriter:
    """Rewrites one document.   names_root: references to the whole document become references into `$defs`, too."""

    def __init__(self, root: Any, field_name: str, close_objects: bool, names_root: bool = False) -> None:
        self._root = root
        self._names_root = names_root
        self._field = field_name
        self._closes = close_objects
        self._refs = SchemaRefs(root)
        self._names: dict[int, str] = {}  # id of what a $ref names -> its name in $defs
        self._todo: list[tuple[str, Any, tuple[str, ...]]] = []
        self._multiple = 1
        self._num_schemas = 0
        self._listed_names: ListedNames | None = None  # only schemas with patternProperties need them

    def run(self) -> Schema:
        schema, defs = self._rewrite_all()
        return {**schema, "$defs": defs} if defs and isinstance(schema, dict) else schema

    def run_on_properties(self) -> dict[str, Schema]:
        schema, defs = self._rewrite_all()
        names = {name: _names_in(one) for name, one in defs.items()}
        found: dict[str, Schema] = {}
        num_parts = 0
        for name, one in schema.get("properties", {}).items() if isinstance(schema, dict) else ():
            used = {of: defs[of] for of in _reachable(_names_in(one), names)}
            size = SchemaSize(one, used)
            reason = size.excess()
            num_parts += size.num_parts
            if reason or num_parts > MAX_PARTS:
                raise self._refuse((), reason or f"{TOO_LARGE}, and what properties refer to counts for each of them")
            found[name] = {**one, "$defs": used} if used and isinstance(one, dict) else one
        return found

    def _rewrite_all(self) -> tuple[Schema, dict[str, Schema]]:
        """Return the document and what it refers to, by name."""
        schema = self._rewrite(self._root, ())
        defs: dict[str, Schema] = {}
        while self._todo:
            name, target, at = self._todo.pop()
            defs[name] = self._rewrite(target, at)
        reason = SchemaSize(schema, defs).excess()
        if reason:
            raise self._refuse((), reason)
        if endless({"#": schema, **{f"#/$defs/{name}": one for name, one in defs.items()}}):
            raise self._refuse((), "no text satisfies it, because references lead back to themselves without an end")
        return schema, defs

    def _refuse(self, at: tuple[str, ...], why: str) -> RequestError:
        pointer = "/" + "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in at)
        if len(pointer) > _MAX_POINTER_CHARS:
            pointer = "..." + pointer[-_MAX_POINTER_CHARS:]
        return RequestError(f"{self._field}: at {pointer}: {why}", self._field)

    def _rewrite(self, schema: Any, at: tuple[str, ...]) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refuse(at, f"a schema is an object or a boolean, not {type(schema).__name__}")
        if len(at) > MAX_DEPTH:
            raise self._refuse(at, f"schemas are nested more than {MAX_DEPTH} deep")
        self._num_schemas += 1
        if self._num_schemas > MAX_PARTS:
            raise self._refuse((), f"more than {MAX_PARTS} schemas are not supported")
        out: dict[str, Any] = {}
        for name, value in schema.items():
            if name in _UNSUPPORTED:
                if value is not _NO_EFFECT.get(name, out):
                    raise self._refuse((*at, name), "is not supported")
            elif name not in _DROPPED:
                out[name] = self._keyword(schema, name, value, (*at, name))
        self._modernise(schema, out, at)
        if "oneOf" in out and self._are_tagged(schema["oneOf"]):
            out["allOf"] = [*_listed(out.get("allOf", [])), {"anyOf": out.pop("oneOf")}]
        self._check_numbers(out, at)
        if self._closes and "properties" in out:
            out.setdefault("additionalProperties", False)
        self._list_finite_patterns(out, at)
        self._check_min_properties(out, at)
        return out

    def _keyword(self, schema: dict[str, Any], name: str, value: Any, at: tuple[str, ...]) -> Any:
        """Return a keyword's value with the schemas in it rewritten. The library refuses values of a wrong type."""
        if name == "$ref":
            return self._refer(schema, value, at)
        if name in _LISTS and isinstance(value, list):
            return [self._rewrite(one, (*at, str(i))) for i, one in enumerate(value)]
        if name in _MAPS and isinstance(value, dict):
            return {key: self._rewrite(one, (*at, key)) for key, one in value.items()}
        if name == "additionalProperties" or (name == "items" and not isinstance(value, list)):
            return self._rewrite(value, at)
        return value

    def _refer(self, schema: dict[str, Any], reference: Any, at: tuple[str, ...]) -> str:
        if not isinstance(reference, str):
            raise self._refuse(at, "must be a string")
        try:
            target = self._refs.find(reference, schema)
        except KeyError:
            why = f"{reference!r:.100} is not in this document; external schemas are not fetched"
            raise self._refuse(at, why) from None
        if target is self._root and not self._names_root:
            return "#"
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._todo.append((self._names[id(target)], target, _steps(reference)))
        return f"#/$defs/{self._names[id(target)]}"

    def _modernise(self, schema: dict[str, Any], out: dict[str, Any], at: tuple[str, ...]) -> None:
        """Give today's form to a format, to draft 4's flags next to bounds, and to tuples from before 2020-12."""
        for bound in ("minimum", "maximum"):
            flag = "exclusive" + bound.capitalize()
            if isinstance(out.get(flag), bool) and out.pop(flag) and bound in out:
                out[flag] = out.pop(bound)
        out.pop("additionalItems", None)
        if isinstance(schema.get("items"), list):
            if "prefixItems" in schema:
                raise self._refuse((*at, "items"), "must be a schema next to prefixItems")
            prefix = out.pop("items")
            out["prefixItems"] = [self._rewrite(one, (*at, "items", str(i))) for i, one in enumerate(prefix)]
            if "additionalItems" in schema:
                out["items"] = self._rewrite(schema["additionalItems"], (*at, "additionalItems"))
        name = out.get("format")
        if isinstance(name, str) and name not in FORMATS:
            del out["format"]
        if isinstance(name, str) and name in FORMAT_PATTERNS:
            out["allOf"] = [*_listed(out.get("allOf", [])), {"pattern": FORMAT_PATTERNS[name]}]

    def _are_tagged(self, alternatives: Any) -> bool:
        """Whether each of a oneOf's alternatives is an object that requires a property with strings of its own.

        Then a value fits one at most. The library finds that out too, but not behind `$ref`, and pair by pair.
        """
        if not isinstance(alternatives, list):
            return False
        resolved = [self._resolve(one) for one in alternatives]
        if not all(one.get("type") == "object" and isinstance(one.get("required"), list) for one in resolved):
            return False
        names = [name for name in resolved[0]["required"] if isinstance(name, str)] if resolved else []
        return any(self._has_distinct_tags(resolved, name) for name in names[:_MAX_TAGS])

    def _has_distinct_tags(self, alternatives: list[dict[str, Any]], name: str) -> bool:
        seen: set[str] = set()
        for one in alternatives:
            properties = one.get("properties")
            if name not in one["required"] or not isinstance(properties, dict):
                return False
            tag = self._resolve(properties.get(name))
            values = [tag["const"]] if "const" in tag else tag.get("enum")
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                return False
            if not seen.isdisjoint(values):
                return False
            seen.update(values)
        return True

    def _resolve(self, schema: Any) -> dict[str, Any]:
        """Return what a schema says or, by one reference, refers to; {} if that is not an object."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            with contextlib.suppress(KeyError):
                schema = self._refs.find(schema["$ref"], schema)
        return schema if isinstance(schema, dict) else {}

    def _list_finite_patterns(self, out: dict[str, Any], at: tuple[str, ...]) -> None:
        """Make properties of the patterns that match listed names only; see dead_ends.py."""
        patterns = out.get("patternProperties")
        if not isinstance(patterns, dict):
            return
        if self._listed_names is None:
            self._listed_names = ListedNames(self._root)
        for pattern, schema in list(patterns.items()):
            names = self._listed_names.matched_only(pattern)
            if self._listed_names.is_exhausted:
                raise self._refuse(
                    (*at, "patternProperties"),
                    "too many patterns or long names of properties to compare with each other",
                )
            if names is None or not isinstance(out.get("properties", {}), dict):
                continue
            del patterns[pattern]
            properties = out.setdefault("properties", {})
            for name in names:
                properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        if not patterns:
            del out["patternProperties"]

    def _check_numbers(self, out: dict[str, Any], at: tuple[str, ...]) -> None:
        """Refuse numbers that the library would round, and multiples that it would count for too long."""
        for name in _BOUNDS & out.keys():
            value = out[name]
            is_safe = _SAFE_WHEN_HUGE.get(name, 0) * value >= 2**63 - 1 if isinstance(value, int | float) else True
            if _is_inexact(value) and not is_safe:
                raise self._refuse((*at, name), f"an integer beyond {_MAX_EXACT} (2**53) is not supported")
        for name in ("const", "enum"):
            if name in out and any(map(_is_inexact, iter_values(out[name]))):
                raise self._refuse((*at, name), f"an integer beyond {_MAX_EXACT} (2**53) is not supported")
        step = out.get("multipleOf")
        if isinstance(step, int | float) and not isinstance(step, bool) and step > 0:
            digits = Decimal(repr(step)).normalize().as_tuple().digits
            self._multiple = math.lcm(self._multiple, int("".join(map(str, digits))))
            if self._multiple > _MAX_MULTIPLE:
                raise self._refuse((*at, "multipleOf"), f"multiples of more than {_MAX_MULTIPLE} are not supported")

    def _check_min_properties(self, out: dict[str, Any], at: tuple[str, ...]) -> None:
        """Refuse a count that only several unlisted names reach.

        A grammar writes listed properties once each, but may write any other name twice, and readers of JSON count it
        once.
        """
        count, required = out.get("minProperties"), out.get("required", [])
        if not isinstance(count, int | float) or not isinstance(required, list):
            return
        num_required = len(set(map(str, required)))
        is_open = out.get("additionalProperties", True) is not False or "patternProperties" in out
        if is_open and count > num_required + 1:
            most = f"more than {num_required + 1}, one above the number of required properties,"
            why = f"{most} is only supported with additionalProperties: false"
            raise self._refuse((*at, "minProperties"), why)


def _names_in(schema: Schema) -> set[str]:
    """Return the names in `$defs` that a rewritten schema refers to, and perhaps other texts."""
    objects = (one for one in iter_values(schema) if isinstance(one, dict))
    return {str(one["$ref"]).removeprefix("#/$defs/") for one in objects if "$ref" in one}


def _reachable(first: set[str], names: dict[str, set[str]]) -> list[str]:
    """Return which of `names` those of `first` lead to.   names: in `$defs` -> those that it refers to."""
    found: dict[str, None] = {}
    todo = list(first)
    while todo:
        name = todo.pop()
        if name in names and name not in found:
            found[name] = None
            todo += names[name]
    return sorted(found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _steps(reference: str) -> tuple[str, ...]:
    """Return the steps of a reference, if it is a JSON pointer, as the place of what it names."""
    if not reference.startswith("#/"):
        return (reference,)
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in unquote(reference).split("/")[1:])


def _is_inexact(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > _MAX_EXACT
