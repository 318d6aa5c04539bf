"""Rewrite the keywords of a JSON schema that combine or negate schemas.

They come after the other keywords: a negation looks at the properties and values that `place.context` allows.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pagoda.engine.grammars.schema_logic import Schema, common_keywords
from pagoda.engine.grammars.schema_place import SchemaPlace
from pagoda.engine.grammars.schema_refs import escape

Condition = Callable[[SchemaPlace, str], None]

_MAX_ONE_OF = 8  # alternatives that are distinguished by negations, whose number is squared


def _all_of(place: SchemaPlace, name: str) -> None:
    place.more += place.sub_list(name, place.context)


def _not(place: SchemaPlace, name: str) -> None:
    negated = _negated(place, name)
    if negated is not True:
        place.more.append(negated)


def _if_then_else(place: SchemaPlace, name: str) -> None:
    given = place.given
    if "then" not in given and "else" not in given:
        return
    condition = place.sub(given[name], name)
    then = place.sub(given.get("then", True), "then", place.context)
    otherwise = place.sub(given.get("else", True), "else", place.context)
    negated = _negated(place, name)
    holds = [one for one in (condition, then) if one is not True]
    fails = [one for one in (negated, otherwise) if one is not True]
    place.more.append({"anyOf": [{"allOf": holds} if holds else True, {"allOf": fails} if fails else True]})


def _dependencies(place: SchemaPlace, name: str) -> None:
    value = place.given[name]
    if not isinstance(value, dict):
        raise place.refuse(name, "must be an object")
    for key, needed in value.items():
        if isinstance(needed, str):  # draft 3
            needed = [needed]
        if isinstance(needed, list):
            wanted: Schema = {"required": [key, *needed]} if needed else True
        else:
            wanted = place.sub(needed, f"{name}/{escape(key)}", place.context)
        if wanted is not True:
            place.more.append({"anyOf": [{"properties": {key: False}}, wanted]})


def _one_of(place: SchemaPlace, name: str) -> None:
    """Write `oneOf` as `anyOf`: alternatives that overlap are given each other's negations."""
    logic, context = place.rewriter.logic, place.context
    parts = place.sub_list(name, context)
    whole = [common_keywords(context, part) for part in parts]
    overlaps = {
        (i, j)
        for i in range(len(parts))
        for j in range(len(parts))
        if i != j and not logic.are_disjoint(whole[i], whole[j])
    }
    alternatives: list[Schema] = []
    for i, part in enumerate(parts):
        others = [logic.negate(parts[j], context) for j in range(len(parts)) if (i, j) in overlaps]
        if any(one is None for one in others) or (others and len(parts) > _MAX_ONE_OF):
            place.rewriter.uncertain.append(f"{place.at}/{name}")
            place.out["oneOf"] = parts
            return
        alternatives.append({"allOf": [part, *(one for one in others if one is not None)]} if others else part)
    if "anyOf" in place.out:
        place.more.append({"anyOf": alternatives})
    else:
        place.out["anyOf"] = alternatives


def _negated(place: SchemaPlace, name: str) -> Schema:
    """Return the negation of the schema of a keyword. Raises RequestError if it cannot be written."""
    schema: Any = place.given[name]
    if isinstance(schema, dict) and "not" in schema and len(schema) == 1:
        return place.sub(schema["not"], f"{name}/not", place.context)
    negated = place.rewriter.logic.negate(place.sub(schema, name), place.context)
    if negated is None:
        raise place.refuse(name, "its negation cannot be written with the supported keywords")
    return negated


CONDITIONS: Mapping[str, Condition] = {
    "allOf": _all_of,
    "if": _if_then_else,
    "not": _not,
    "dependencies": _dependencies,
    "dependentSchemas": _dependencies,
    "dependentRequired": _dependencies,
    "oneOf": _one_of,
}
"""What rewrites each condition, in this order."""
