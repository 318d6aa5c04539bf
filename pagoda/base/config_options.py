"""Read options as people write them (`max_num_seqs=8, kv_cache_memory="1GiB"`) into the fields of the settings classes.

First the names and what they set, then the forms of the values.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, cast

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.base.setting import DescribedSetting, describe_settings
from pagoda.base.text import is_encodable
from pagoda.base.vllm_options import translate

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
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(|[KMGT]i?B?|B)", re.IGNORECASE)
_COUNT = re.compile(r"(-?[0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmg]?)(i?)", re.IGNORECASE)
_POWERS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4}

RETIRED: Mapping[str, str] = {
    "pin_threads": "the engine process pins its threads if there is one per core",
    "encoder_budget": "it follows from the model and max_num_batched_tokens",
    "encoder_cache_tokens": "it follows from the model and max_num_batched_tokens",
    "no_partial_media": "the model says whether its images must stay whole",
    "max_queued_bytes": "a server holds at most 256 MiB of request bodies",
    "num_lookahead_slots": "drafts find their blocks in the step that verifies them",
    "max_header_bytes": "headers may have 64 KiB; a proxy in front can allow less",
    "header_timeout_s": "a proxy in front of the server limits how slow a client may be",
    "body_timeout_s": "a proxy in front of the server limits how slow a client may be",
    "send_timeout_s": "a client that does not read is dropped after 120 s",
    "template_timeout_s": "chat templates are trusted like the model's weights, and have no time limit",
    "template_memory_bytes": "chat templates are trusted like the model's weights, and have no memory limit",
    "tokenizer_timeout_s": "tokenizers are trusted like the model's weights, and have no time limit",
}
"""Options of earlier versions that are gone, and why."""


def read_options(
    parts: Mapping[str, type[Any]], options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the normalized field values for each part (part -> field -> value), and the names that were given.

    parts: settings classes by name.   options: see `EngineConfig.from_options`; those that are None are not given.
    vLLM's options are translated (see `translate`). Raises one ConfigError for all names that are unknown or refused;
    also for a value that cannot be read, or a field that is given twice.
    """
    options, problems = translate(options)
    known = {name: (part, *item) for part, kind in parts.items() for name, item in option_names(kind).items()}
    chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
    in_groups: list[tuple[str, DescribedSetting, DescribedSetting, Any]] = []
    given: set[str] = set()
    for name, value in options.items():
        check_encodable(name, value)
        if name not in known:
            problems.append(_unknown_option(name, list(known)))
            continue
        if value is None:
            continue
        part, item, group = known[name]
        value = normalize(item, value)
        if group is not None:
            in_groups.append((part, group, item, value))
        else:
            chosen[part][name] = value
        if value is not None:
            given |= {item.name, group.name} if group is not None else {item.name}
    if problems:
        raise ConfigError("; ".join(problems))
    for part, group, item, value in in_groups:
        whole = chosen[part].get(group.name, group.default)
        chosen[part][group.name] = _set_in_group(group, whole, options.get(group.name), item.name, value)
    return chosen, tuple(sorted(given))


def option_names(kind: type[Any]) -> dict[str, tuple[DescribedSetting, DescribedSetting | None]]:
    """Return every name by which the settings of a class are set -> the setting, and the group that it is in."""
    names: dict[str, tuple[DescribedSetting, DescribedSetting | None]] = {}
    for item in describe_settings(kind):
        names[item.name] = (item, None)
        for field_ in item.fields:
            names[f"{item.name}.{field_.name}"] = (field_, item)
            if field_.setting.flat:
                names[field_.name] = (field_, item)
    return names


def _set_in_group(group: DescribedSetting, whole: Any, given: object, name: str, value: object) -> Any:
    """Return a group with one field set.   given: what was given for the whole group. Raises ConfigError."""
    was: object = getattr(whole, name)
    if value != was and (was != getattr(group.default, name) or (isinstance(given, Mapping) and name in given)):
        raise ConfigError(f"{group.name}.{name} is given twice, as {was} and as {value}; give it once")
    return dataclasses.replace(whole, **{name: value})


def _unknown_option(name: str, known: Collection[str]) -> str:
    """Return the error for an option that is not in `known`: what to use instead, or the nearest known name."""
    if (field := name.rpartition(".")[2]) in RETIRED:
        return f"the option {name} is gone: {RETIRED[field]}; leave it out"
    group = next((other.partition(".")[0] for other in known if other.endswith("." + name)), None)
    if group is not None:
        return f"{name} is a field of {group}: write {group}={{{name!r}: ...}}"
    return f"unknown option {abbreviate(name)}{nearest(name, list(known))}"


# ---- values


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
    if item.type is str and isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
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
