"""Find the schemas that `$ref` names: by JSON pointer, `$anchor` or `$id`, inside one document."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

NO_BASE = "http://schema.invalid/"
"""The URI of a document without one."""
_INSTANCES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are not schemas."""


def escape(name: object) -> str:
    """Return a name as one step of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        yield escape(name), child


class SchemaRefs:
    """The places of a schema document by URI and by JSON pointer."""

    def __init__(self, root: Any) -> None:
        """root: the parsed document."""
        self._root = root
        self._place_of: dict[str, str] = {NO_BASE: ""}  # URI -> pointer
        self._base_of: dict[str, str] = {"": NO_BASE}  # pointer of a resource -> its URI
        self._collect(root)

    def _collect(self, root: Any) -> None:
        todo = [("", NO_BASE, root)]
        while todo:
            at, base, value = todo.pop()
            if isinstance(value, dict):
                for name in ("$id", "id"):
                    own = value.get(name)
                    if isinstance(own, str) and not own.startswith("#"):
                        base = urldefrag(urljoin(base, own)).url
                        self._place_of.setdefault(base, at)
                        self._base_of[at] = base
                        break
                    if isinstance(own, str):  # draft 4's anchors
                        self._place_of.setdefault(base + own, at)
                anchor = value.get("$anchor")
                if isinstance(anchor, str):
                    self._place_of.setdefault(f"{base}#{anchor}", at)
            todo += [(f"{at}/{name}", base, child) for name, child in _children(value) if name not in _INSTANCES]

    def find(self, reference: str, at: str) -> tuple[str, Any] | None:
        """Return the pointer and value of what `reference`, found at pointer `at`, names; None if it is not here."""
        base = self._base_at(at)
        target = base + reference if reference.startswith("#") else urljoin(base, reference)
        if target in self._place_of:
            return self._get(self._place_of[target])
        uri, fragment = urldefrag(target)
        start = self._place_of.get(uri)
        if start is None or (fragment and not fragment.startswith("/")):
            return None
        return self._get(start + unquote(fragment))

    def _base_at(self, at: str) -> str:
        while at not in self._base_of:
            at = at.rpartition("/")[0]
        return self._base_of[at]

    def _get(self, pointer: str) -> tuple[str, Any] | None:
        value = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return pointer, value
