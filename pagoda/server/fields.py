"""Body: what every request body of the HTTP API is, and the types of values that several of them use."""

import functools
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


class Body(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request body: unknown fields are errors, null is the same as not given."""

    def __post_init__(self) -> None:
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
