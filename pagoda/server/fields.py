"""Body: what every request body of the HTTP API is, and the types of values that several of them use."""

import functools
import typing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct

from pagoda.base.request_limits import RequestLimits

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
RequestId = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PromptOnlyCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OutputCount = Annotated[int, Meta(ge=1, le=128)]
NumLogprobs = Annotated[int, Meta(ge=0, le=1000)]

if TYPE_CHECKING:
    Flag = bool
    Priority = int
else:
    # null means the default: Body replaces it, so that readers never see None.
    Flag = bool | None
    Priority = Int32 | None

_WORDS = "words"
_LONGEST_WORD = 64


def one_of(*words: str) -> Meta:
    """Return what makes Annotated[str, ...] a field of a Body that takes one of these words.

    For a Literal, msgspec would repeat a wrong value in its error, however long: 0.1 s for one of megabytes.
    """
    return Meta(max_length=_LONGEST_WORD, extra_json_schema={"enum": list(words)}, extra={_WORDS: words})


class Body(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request body: unknown fields are errors, null is the same as not given."""

    def __post_init__(self) -> None:
        for name, words in _words(type(self)):
            if isinstance(value := getattr(self, name), str) and value not in words:
                raise ValueError(f"`{name}`: expected {_either(words)}, got {value!r}")  # msgspec adds the place
        for name, default in _defaults(type(self)):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)

    def check(self, limits: RequestLimits) -> None:
        """Raise RequestError for fields that contradict each other, and for counts and sizes beyond `limits`."""


@functools.cache
def _defaults(kind: type[Body]) -> tuple[tuple[str, Any], ...]:
    """Return the fields whose default is not None, with that default."""
    fields = ((field.name, field.default) for field in msgspec.structs.fields(kind))
    none = (None, UNSET, msgspec.NODEFAULT)
    return tuple((name, value) for name, value in fields if not any(value is one for one in none))


@functools.cache
def _words(kind: type[Body]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the fields that take one of some words, and these."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for part in (hint, *typing.get_args(hint)):
            for meta in getattr(part, "__metadata__", ()):
                if isinstance(meta, Meta) and meta.extra and _WORDS in meta.extra:
                    found.append((name, meta.extra[_WORDS]))
    return tuple(found)


def _either(words: tuple[str, ...]) -> str:
    """Return the words as a message lists them: 'a', 'b' or 'c'."""
    *most, last = map(repr, words)
    return f"{', '.join(most)} or {last}" if most else last
