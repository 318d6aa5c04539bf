"""SchemaRefs: what the references of a JSON schema name, inside its own document."""

from typing import Any
from urllib.parse import unquote, urljoin

from pagoda.base.text import as_integer

_NO_BASE = "http://schema.invalid/"
"""The URI of a document without one."""
_INSTANCES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose values are schemas by names, which may be any: also those of keywords."""


class SchemaRefs:
    """The values of a schema document by URI and by JSON pointer."""

    def __init__(self, root: Any) -> None:
        """root: the parsed document."""
        self._base_of: dict[int, str] = {}  # id of an object in the document -> the URI that its references start from
        self._named: dict[str, Any] = {_NO_BASE: root}  # URI -> what has it as `$id` or `$anchor`
        todo = [(root, _NO_BASE, False)]
        while todo:
            value, base, has_names = todo.pop()
            if isinstance(value, dict):
                base = base if has_names else self._add_names(value, base)
                self._base_of[id(value)] = base
                for name, child in value.items():
                    if has_names or name not in _INSTANCES:
                        todo.append((child, base, not has_names and name in _NAMED))
            elif isinstance(value, list):
                todo += [(child, base, False) for child in value]

    def find(self, reference: str, place: dict[str, Any]) -> Any:
        """Return what `reference`, a keyword of the schema `place`, names. Raises KeyError if it is not here."""
        uri, _, fragment = _join(self._base_of[id(place)], reference).partition("#")
        if fragment and not fragment.startswith("/"):
            return self._named[f"{uri}#{fragment}"]
        value = self._named[uri]
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value[name]
            elif isinstance(value, list) and (index := as_integer(name)) is not None and 0 <= index < len(value):
                value = value[index]
            else:
                raise KeyError(reference)
        return value

    def _add_names(self, value: dict[str, Any], base: str) -> str:
        """Record the names that a schema gives itself. Return the URI that references inside it start from."""
        own = value.get("$id", value.get("id"))
        if isinstance(own, str) and own.startswith("#"):  # draft 4's anchors
            self._named.setdefault(base + own, value)
        elif isinstance(own, str):
            base = _join(base, own).partition("#")[0]
            self._named.setdefault(base, value)
        anchor = value.get("$anchor")
        if isinstance(anchor, str):
            self._named.setdefault(f"{base}#{anchor}", value)
        return base


def _join(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference  # not a URI: leave it as it is
