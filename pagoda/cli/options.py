"""Command-line flags made from the settings' dataclasses, in this one place: a field there is a flag here.

A flag that is not given leaves its field at its default, so only what was typed reaches `EngineConfig.from_options`.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer

from pagoda.base.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    parse_size,
)
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.flag_help import HELP

ENGINE_PARTS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig)
PANELS: dict[type, str] = {
    ModelConfig: "Model",
    CacheConfig: "KV cache",
    SchedulerConfig: "Scheduler",
    ParallelConfig: "Devices and threads",
    ServerConfig: "Server",
    SamplingParams: "Sampling",
}
MOST_USED = "Most used settings"
MOST_USED_FIELDS = (
    "model",
    "host",
    "port",
    "api_keys",
    "served_model_name",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory",
    "dtype",
    "quantization",
    "threads",
    "seed",
)
"""Ten settings of an engine and a server that people set most, with the two names a server needs."""
PANEL_ORDER = ("Sampling", MOST_USED, "Model", "KV cache", "Scheduler", "Devices and threads", "Server")
CLI_SAMPLING: dict[str, object] = {"temperature": 0.7, "top_p": 0.95}
"""How `generate` and `chat` sample unless flags say otherwise."""
# Where the field's plural would make a strange flag.
FLAG_NAMES = {"api_keys": "--api-key"}
SHORT_FLAGS = {"model": "-m"}
SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)


def parse_bytes(text: str) -> int:
    """As `parse_size`, with typer's error."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _flag_of(field: str) -> str:
    return FLAG_NAMES.get(field, "--" + field.replace("_", "-"))


def _parameter(part: type, item: "dataclasses.Field[Any]", default: object) -> inspect.Parameter:
    """One dataclass field as a typer parameter whose value is None unless the flag is given.

    default: shown in the help.
    """
    kind = _without_none(typing.get_type_hints(part)[item.name])
    flags = [_flag_of(item.name)]
    if kind is bool:
        name = flags[0][2:]
        flags = [f"--{name}/--{name.removeprefix('no-')}" if name.startswith("no-") else f"--{name}/--no-{name}"]
    elif item.name in SHORT_FLAGS:
        flags.append(SHORT_FLAGS[item.name])
    if typing.get_origin(kind) is tuple or kind is RequestLimits:
        kind = list[str]
    option = typer.Option(
        *flags,
        help=HELP.get(item.name, "") + _shown(default),
        rich_help_panel=MOST_USED if item.name in MOST_USED_FIELDS else PANELS[part],
        show_default=False,
        parser=parse_bytes if item.name == "kv_cache_memory" else None,
        metavar="BYTES" if item.name == "kv_cache_memory" else None,
    )
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        return members[0]
    return hint


def _shown(default: object) -> str:
    """A default as the help prints it, after the text."""
    if default is None or default == () or default is dataclasses.MISSING:
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {default.value if isinstance(default, Enum) else default})"


def _engine_parameters(parts: tuple[type, ...]) -> list[inspect.Parameter]:
    fields = [(part, item) for part in parts for item in dataclasses.fields(part)]
    order = {name: index for index, name in enumerate(MOST_USED_FIELDS)}
    fields.sort(key=lambda pair: order.get(pair[1].name, len(order)))  # stable: the rest stays as declared
    return [_parameter(part, item, item.default) for part, item in fields]


def _sampling_parameters(defaults: dict[str, object]) -> list[inspect.Parameter]:
    fields = {item.name: item for item in dataclasses.fields(SamplingParams)}
    return [
        _parameter(SamplingParams, fields[name], defaults.get(name, fields[name].default)) for name in SAMPLING_FIELDS
    ]


def engine_options(*extra_parts: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every engine flag; it receives those that were given as `options: dict[str, object]`.

    extra_parts: further settings classes (ServerConfig).
    """
    return _collected("options", _engine_parameters((*ENGINE_PARTS, *extra_parts)))


def sampling_options(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the sampling flags; it receives `sampling: dict[str, object]`.

    The flags that were given override `defaults`, and those CLI_SAMPLING.
    """
    defaults = {**CLI_SAMPLING, **defaults}
    return _collected("sampling", _sampling_parameters(defaults), defaults)


def _collected(
    name: str, parameters: list[inspect.Parameter], defaults: dict[str, object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that replaces the command's parameter `name` by flags, and gathers their values into it again."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {parameter.name: given.pop(parameter.name) for parameter in parameters}
            gathered = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if v is not None}
            command(**{name: {**(defaults or {}), **gathered}}, **given)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != name]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        signature = inspect.Signature([*own, *parameters])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def engine_config(options: dict[str, object]) -> EngineConfig:
    """The flags that were given as settings."""
    return EngineConfig.from_options(**options)
