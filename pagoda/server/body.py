"""Request bodies: what each of them is, and the types of their fields."""

import functools
import logging
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, Struct

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits

logger = logging.getLogger("pagoda.server")

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PromptOnlyCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OutputCount = Annotated[int, Meta(ge=1, le=128)]
NumLogprobs = Annotated[int, Meta(ge=0, le=1000)]
NumTop = Annotated[int, Meta(ge=-1, le=1000)]
"""Log-probabilities per token; -1: as many as the server allows."""

if TYPE_CHECKING:
    T = typing.TypeVar("T")
    OrDefault = Annotated[T, ""]
else:
    # null means the default: Body replaces it, so that readers never see None.
    OrDefault = typing.Optional
Flag = OrDefault[bool]
Priority = OrDefault[Int32]

_WORDS = "words"
_LONGEST_WORD = 64


def one_of(*words: str) -> Meta:
    """Return what makes Annotated[str, ...] a field of a Body that takes one of these words.

    For a Literal, msgspec would repeat a wrong value in its error, however long: 0.1 s for one of megabytes.
    """
    return Meta(max_length=_LONGEST_WORD, extra_json_schema={"enum": list(words)}, extra={_WORDS: words})


ITEMS = "items"


def items_of(kind: type[Struct]) -> Meta:
    """Return what makes Annotated[list[dict[str, Any]], ...] a list whose entries are described as `kind`."""
    return Meta(extra_json_schema={"items": {"$ref": f"#/components/schemas/{kind.__name__}"}}, extra={ITEMS: kind})


@dataclass(frozen=True, slots=True)
class UnservedField:
    """A field that clients send, of which only values that ask for nothing are accepted.

    what: completes "this server does not support ...".   neutral: accepted values, in addition to NEUTRAL.
    """

    what: str
    neutral: tuple[Any, ...] = ()


NEUTRAL: tuple[Any, ...] = (None, False, [], "")


class Body(Struct, kw_only=True, frozen=True):
    """A request body: null is the same as not given; of unknown fields see BodyReader.

    unserved: fields that are known but not declared, by name.
    """

    unserved: ClassVar[Mapping[str, UnservedField]] = {}

    def __post_init__(self) -> None:
        for name, words in words_of(type(self)):
            if isinstance(value := getattr(self, name), str) and value not in words:
                # msgspec adds the place
                raise ValueError(f"`{name}`: expected {either(map(repr, words))}, got {value!r}")
        for name, default in _defaults(type(self)):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)

    def check(self, limits: RequestLimits) -> None:
        """Raise RequestError for fields that contradict each other, and for counts and sizes beyond `limits`."""

    def left_out(self) -> list[str]:
        """Return names of entries of lists that are known, not served, and left out."""
        return []


class ModelBody(Body, kw_only=True, frozen=True):
    """A body that says which model is asked.

    model: A name of the model (also if not given), or of an adapter.
    """

    model: str | None = None


def as_list(prompts: str | list[Any]) -> list[Any]:
    """Return a text, token ids, or several of either, as a list."""
    return [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts


_PROMPT_KINDS: dict[type, str] = {str: "a string", int: "a token id", list: "a list of token ids"}


def check_alike(name: str, prompts: str | list[Any]) -> None:
    """Raise RequestError, naming the first entry of a list of prompts that is of another type than the one before.

    name: the field that they are in.
    """
    if isinstance(prompts, str) or len(set(map(type, prompts))) <= 1:
        return
    first = type(prompts[0])
    at = next(index for index, entry in enumerate(prompts) if type(entry) is not first)
    expected, given = _PROMPT_KINDS[first], _PROMPT_KINDS[type(prompts[at])]
    raise RequestError(f"{name}[{at}]: expected {expected}, as in {name}[0], got {given}", f"{name}[{at}]")


@functools.cache
def _defaults(kind: type[Body]) -> tuple[tuple[str, Any], ...]:
    """Return the fields whose default is not None, with that default."""
    fields = ((field.name, field.default) for field in msgspec.structs.fields(kind))
    none = (None, UNSET, msgspec.NODEFAULT)
    return tuple((name, value) for name, value in fields if not any(value is one for one in none))


@functools.cache
def words_of(kind: type[Struct]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the fields that take one of some words, and these."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for part in (hint, *typing.get_args(hint)):
            for meta in getattr(part, "__metadata__", ()):
                if isinstance(meta, Meta) and meta.extra and _WORDS in meta.extra:
                    found.append((name, meta.extra[_WORDS]))
    return tuple(found)


def either(words: Iterable[str]) -> str:
    """Return words as a message lists them: a, b or c."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
