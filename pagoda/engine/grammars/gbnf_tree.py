"""The rules of a GBNF grammar as trees."""

from dataclasses import dataclass
from enum import Enum

Ranges = tuple[tuple[int, int], ...]
"""Characters, as the first and the last code point of each range."""


class ItemKind(Enum):
    LITERAL = "literal"
    CHARS = "chars"  # one character of several
    TOKEN = "token"
    NAME = "name"  # of a rule


@dataclass(frozen=True, slots=True)
class Item:
    """text: the characters of a literal, a rule's name, or how Lark's syntax writes it.   ranges: of CHARS."""

    kind: ItemKind
    text: str
    ranges: Ranges = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """operators: "*", "+", "?" or "{low,high}", the innermost first."""

    inner: "Node"
    operators: list[str]

    @property
    def can_be_none(self) -> bool:
        return any(operator[0] in "*?" or operator[1:2] == "0" for operator in self.operators)

    @property
    def can_be_many(self) -> bool:
        return any(operator != "?" and operator not in ("{0}", "{1}", "{0,1}", "{1,1}") for operator in self.operators)


@dataclass(frozen=True, slots=True)
class Group:
    """choices: sequences."""

    choices: "list[list[Node]]"


Node = Item | Repeat | Group
