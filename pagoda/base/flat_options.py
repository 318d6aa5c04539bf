"""Read flat options (`max_num_seqs=8, block_size=16`) into the fields of the settings classes."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from pagoda.base.abbreviate import abbreviate
from pagoda.base.config_values import check_encodable, normalize
from pagoda.base.errors import ConfigError
from pagoda.base.registry import nearest
from pagoda.base.setting import DescribedSetting, describe_settings
from pagoda.base.vllm_options import translate

RETIRED: Mapping[str, str] = {
    "pin_threads": "the engine process pins its threads if there is one per core",
    "encoder_budget": "it follows from the model and max_num_batched_tokens",
    "encoder_cache_tokens": "it follows from the model and max_num_batched_tokens",
    "no_partial_media": "the model says whether its images must stay whole",
    "max_queued_bytes": "a server holds at most 256 MiB of request bodies",
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

    parts: settings classes by name.   options: see `EngineConfig.from_options`; those that are None are not "given".
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
