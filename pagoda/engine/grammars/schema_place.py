"""SchemaPlace: one schema of a caller's document, while it is rewritten."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from pagoda.base.errors import RequestError
from pagoda.engine.grammars.schema_logic import Schema, SchemaLogic
from pagoda.engine.grammars.schema_refs import escape


class Rewriter(Protocol):
    """What the rewriting of a keyword may ask of the whole document's.

    logic: negations of rewritten schemas.   uncertain: pointers of keywords that only the library can accept or refuse.
    """

    logic: SchemaLogic
    uncertain: list[str]

    def rewrite(self, schema: Any, at: str, context: Schema, depth: int) -> Schema:
        """Return the schema at pointer `at`, rewritten.   context: a schema that its values satisfy too."""
        ...

    def refer(self, reference: str, at: str, depth: int) -> str | None:
        """Return the rewritten reference; None if it is not in the document."""
        ...

    def refuse(self, at: str, why: str) -> RequestError:
        """Return the error for the keyword at pointer `at`."""
        ...


@dataclass(slots=True)
class SchemaPlace:
    """One schema, and what has been rewritten of it.

    given: as the caller wrote it.   at: its JSON pointer.   depth: how deep it is nested.
    context: a schema that its values satisfy too, by keywords around it.
    out: the rewritten keywords.   more: rewritten schemas that its values must satisfy, too.
    """

    rewriter: Rewriter
    given: dict[str, Any]
    at: str
    depth: int
    context: Schema
    out: dict[str, Any] = field(default_factory=dict)
    more: list[Schema] = field(default_factory=list)

    def sub(self, schema: Any, under: str, context: Schema = True) -> Schema:
        """Return the schema at `under`, a pointer relative to this place, rewritten."""
        return self.rewriter.rewrite(schema, f"{self.at}/{under}", context, self.depth + 1)

    def sub_list(self, name: str, context: Schema = True) -> list[Schema]:
        """Return the rewritten schemas in the list that keyword `name` has. Raises RequestError."""
        value = self.given[name]
        if not isinstance(value, list) or not value:
            raise self.refuse(name, "must be a list of at least one schema")
        return [self.sub(one, f"{name}/{index}", context) for index, one in enumerate(value)]

    def sub_map(self, name: str) -> dict[str, Schema]:
        """Return the rewritten schemas in the object that keyword `name` has. Raises RequestError."""
        value = self.given[name]
        if not isinstance(value, dict):
            raise self.refuse(name, "must be an object of schemas")
        return {key: self.sub(one, f"{name}/{escape(key)}") for key, one in value.items()}

    def refuse(self, under: str, why: str) -> RequestError:
        """Return the error for what is at `under`."""
        return self.rewriter.refuse(f"{self.at}/{under}", why)
