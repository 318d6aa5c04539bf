"""How a setting is documented where it is declared: its help, its range and its words, as metadata of its type.

The checks of the settings, the flags of the command line and their help, and docs/reference/settings.md derive from it.
"""

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """Documentation and range of one setting, written as `Annotated[type, Setting(...)]`.

    text: one sentence for the help and the reference page, with the unit; for a limit of a request what it counts, as
    errors say it after the number.   unset: what None means.
    at_least: smallest number allowed.   words: all values of a setting that is one of a few strings.
    is_size: a number of bytes, also accepted as a string such as "16MiB".
    flat: for a field of a group: its name alone is accepted too (`max_logprobs` for `request_limits.max_logprobs`),
    because it is a name that users of other engines know.
    is_secret: its value is in no error, no recording and no bundle.
    """

    text: str
    unset: str = ""
    at_least: float | None = None
    words: tuple[str, ...] = ()
    is_size: bool = False
    flat: bool = False
    is_secret: bool = False

    @property
    def sentence(self) -> str:
        """The text as a sentence."""
        return self.text if self.text.endswith(".") else f"Maximum {self.text}."


@dataclass(frozen=True, slots=True)
class DescribedSetting:
    """One field of a settings class.

    type: without None and metadata.   optional: None is allowed.   default: the value of a field that is not given.
    """

    name: str
    type: Any
    optional: bool
    default: Any
    setting: Setting

    @property
    def is_group(self) -> bool:
        """The setting holds several named values in a dataclass of its own."""
        return dataclasses.is_dataclass(self.type)

    @property
    def is_list(self) -> bool:
        """The setting holds any number of strings."""
        return typing.get_origin(self.type) is tuple

    @property
    def is_mapping(self) -> bool:
        """The setting holds names and values of any kind, as a JSON object."""
        return typing.get_origin(self.type) is dict

    @property
    def fields(self) -> "tuple[DescribedSetting, ...]":
        """The settings in a group; none for any other setting."""
        return describe_settings(self.type) if self.is_group else ()


@functools.cache
def describe_settings(kind: type[Any]) -> tuple[DescribedSetting, ...]:
    """Return the documented fields of a settings class, in the order of their declaration."""
    hints = typing.get_type_hints(kind, include_extras=True)
    described: list[DescribedSetting] = []
    for item in dataclasses.fields(kind):
        notes = [note for note in getattr(hints[item.name], "__metadata__", ()) if isinstance(note, Setting)]
        if not notes:
            continue
        hint = hints[item.name].__origin__
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        value_type = next(member for member in members if member is not types.NoneType)
        described.append(DescribedSetting(item.name, value_type, types.NoneType in members, default_of(item), notes[0]))
    return tuple(described)


def default_of(item: "dataclasses.Field[Any]") -> Any:
    """Return the default value of a dataclass field."""
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def show_default(described: DescribedSetting) -> str:
    """Return the default as the help and the reference page print it; empty if there is nothing to say."""
    default = described.default
    if described.is_group:
        return ""
    if default is None or default in ((), {}, ""):
        return described.setting.unset
    if isinstance(default, bool):
        return "on" if default else "off"
    if described.setting.is_size:
        return _show_size(default)
    return str(default.value if isinstance(default, Enum) else default)


def _show_size(num_bytes: int) -> str:
    """Return a number of bytes in the largest binary unit that divides it."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return str(num_bytes)
