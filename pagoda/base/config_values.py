"""Values of settings in the forms that people write them, brought to the form that the settings hold."""

import json
import os
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.base.setting import DescribedSetting
from pagoda.base.text import is_encodable

_SECRETS = ("api_keys", "admin_api_key")  # never repeated in an error
_DTYPES = ("dtype", "kv_cache_dtype")
_DTYPE_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "fp8_e4m3": "fp8",
}
_BYTES = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(|[KMGT]i?B?|B)", re.IGNORECASE)
_COUNT = re.compile(r"(-?\d{1,18}(?:\.\d{1,9})?)\s*([kmg]?)(i?)", re.IGNORECASE)
_POWERS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of `1073741824`, `1GiB` or `1.5G`; units are powers of 1024, those with a bare B (`MB`) of 1000.

    Raises ValueError that says what a size looks like.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{abbreviate(text)} is not a size; write bytes or a number with KiB, MiB, GiB")
    unit = match[2].upper()
    base = 1000 if len(unit) == 2 and unit.endswith("B") else 1024
    return int(float(match[1]) * base ** _POWERS[unit[:1]])


def check_encodable(name: str, value: Any) -> None:
    """Raise ConfigError for a string that is not valid Unicode: it can be sent to no process and no client."""
    texts = value if isinstance(value, list | tuple) else [value]
    for text in cast("list[object]", texts):
        text = os.fspath(text) if isinstance(text, os.PathLike) else text
        if isinstance(text, str) and not is_encodable(text):
            raise ConfigError(f"{_shown(name, text)} is not valid UTF-8: write it in UTF-8, or rename the file")


def _shown(name: str, value: str) -> str:
    return name if name in _SECRETS else f"{name}={abbreviate(value)}"


def normalize(item: DescribedSetting, value: Any) -> Any:
    """Return a value in the form that its setting holds. Raises ConfigError for what has no such form."""
    name = item.name
    if item.is_group:
        return value if isinstance(value, item.type) else _to_group(item, value)
    if isinstance(item.type, type) and issubclass(item.type, Enum):
        return value if isinstance(value, Enum) else _to_enum(name, item.type, value)
    if item.is_list and isinstance(value, str):
        return _to_strings(name, value)
    if item.is_list and isinstance(value, list | tuple):
        strings = tuple(str(one) if type(one) is int else one for one in cast("list[object]", value))
        return _to_strings(name, strings[0]) if len(strings) == 1 and isinstance(strings[0], str) else strings
    if item.setting.is_size and isinstance(value, str):
        return _to_size(name, value)
    if item.type is int and isinstance(value, str):
        value = _to_count(item, value)
    if name == "max_model_len" and type(value) is int and value == -1:
        return None  # vLLM's number for "auto"
    if item.is_mapping and isinstance(value, str):
        return _to_mapping(name, value)
    if name in _DTYPES and isinstance(value, str):
        return _DTYPE_NAMES.get(value, value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _to_size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def parse_count(text: str) -> int:
    """Return the integer of `4096`, `4k` (4,000), `4K` or `4Ki` (4,096); also with m and g, and with a fraction.

    Raises ValueError that says what a count looks like.
    """
    match = _COUNT.fullmatch(text.strip())
    number = None
    if match is not None and match[2]:
        base = 1024 if match[3] or match[2].isupper() else 1000
        number = float(match[1]) * base ** (1 + "kmg".index(match[2].lower()))
    elif match is not None and not match[3]:
        number = float(match[1])
    if number is None or number != int(number):
        raise ValueError(f"{abbreviate(text)} is not an integer; write one, or a number with k (1000) or K (1024)")
    return int(number)


def _to_count(item: DescribedSetting, value: str) -> int | None:
    if value == "auto" and item.optional:
        return None
    try:
        return parse_count(value)
    except ValueError as error:
        raise ConfigError(f"{item.name}: {error}") from None


def _to_strings(name: str, value: str) -> tuple[str, ...]:
    """Return one string, or those of a JSON list, as vLLM's flags take them."""
    if not value.startswith("["):
        return (value,)
    try:
        return tuple(json.loads(value))
    except ValueError:
        raise ConfigError(f"{_shown(name, value)} is not a JSON list") from None


def _to_mapping(name: str, value: str) -> dict[str, Any]:
    try:
        mapping = json.loads(value)
    except ValueError:
        mapping = None
    if not isinstance(mapping, dict):
        raise ConfigError(f"{name}={abbreviate(value)} is not a JSON object")
    return cast("dict[str, Any]", mapping)


def _to_enum(name: str, kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(str(member.value) for member in kind)
        raise ConfigError(f"{name}={abbreviate(value)} is not one of: {words}") from None


def _to_group(item: DescribedSetting, given: Any) -> Any:
    """Return the defaults of a group with changes.   given: a mapping of names to values, or that as a JSON string."""
    members = {member.name: member for member in item.fields}
    some = next(iter(members))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ConfigError(
                f"{item.name}={abbreviate(given)} is not JSON: write --{dashed(item.name)}.{dashed(some)} VALUE, or "
                f"--{dashed(item.name)} '{{\"{some}\": VALUE}}'"
            ) from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{item.name}={abbreviate(given)} must map names to values, such as {{{some!r}: ...}}")
    changes: dict[str, Any] = {}
    for name, value in cast("Mapping[object, object]", given).items():
        if name not in members:
            raise ConfigError(f"{item.name} has no {abbreviate(name)}{nearest(str(name), list(members))}")
        check_encodable(str(name), value)
        changes[str(name)] = normalize(members[str(name)], value)
    return item.type(**changes)


def dashed(name: str) -> str:
    """Return the name of a setting as flags spell it."""
    return name.replace("_", "-")
