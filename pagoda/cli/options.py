"""Command-line flags made from the settings' dataclasses, in this one place: a field there is a flag here.

A group has one flag for all of it, which takes JSON, and one flag for each of its fields: --group.field.
A flag that is not given leaves its field at its default, so only what was typed reaches `EngineConfig.from_options`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pagoda.base.config import (
    CacheConfig,
    DebugConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pagoda.base.config_options import dashed, normalize
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.server_config import ServerConfig
from pagoda.base.setting import DescribedSetting, describe_settings, show_default

ENGINE_PARTS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, DebugConfig)
PANELS: dict[type, str] = {
    ModelConfig: "Model",
    CacheConfig: "KV cache",
    SchedulerConfig: "Scheduler",
    ParallelConfig: "Devices, workers and threads",
    ServerConfig: "Server",
    DebugConfig: "Testing and debugging",
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
CLI_SAMPLING: dict[str, object] = {"temperature": 0.7, "top_p": 0.95}
"""How `generate` and `chat` sample unless flags or the model's own defaults say otherwise."""
# Where the field's plural would make a strange flag.
FLAG_NAMES = {"api_keys": "--api-key"}
SHORT_FLAGS = {"model": "-m"}
SAMPLING_FIELDS = tuple(item.name for item in describe_settings(SamplingParams))
"""Sampling parameters that are flags: those with a documentation."""


def _reader_of(item: DescribedSetting) -> Callable[[str], Any]:
    """Return what reads a setting's values, with typer's error, which names the flag."""

    def read(text: str) -> Any:
        try:
            return normalize(item, text)
        except ConfigError as error:
            raise typer.BadParameter(str(error).removeprefix(f"{item.name}: ")) from None

    return read


def flag_of(name: str) -> str:
    """Return the flag of a setting, or of a field of a group ("group.field")."""
    return FLAG_NAMES.get(name, "--" + dashed(name))


def _negated(flag: str) -> str:
    """Return the flag that switches a setting off: --no-x, and --group.no-x for a field of a group."""
    group, dot, field = flag[2:].rpartition(".")
    return f"--{group}{dot}no-{field}"


def _parameter(part: type, item: DescribedSetting, default: str, group: str = "") -> inspect.Parameter:
    """Return one setting as a typer parameter whose value is None unless the flag is given.

    default: shown in the help.   group: that the setting is a field of; only fields declared flat are in the help.
    """
    flags = [flag_of(f"{group}.{item.name}" if group else item.name)]
    if group and item.setting.flat:
        flags.insert(0, flag_of(item.name))
    if item.type is bool:
        flags = [f"{flag}/{_negated(flag)}" for flag in flags]
    elif not group and item.name in SHORT_FLAGS:
        flags.append(SHORT_FLAGS[item.name])
    is_number = item.type is int  # may be written with a unit
    json_of = "JSON" if item.is_group or item.is_mapping else None
    option = typer.Option(
        *flags,
        help=_help_of(item, default),
        rich_help_panel=MOST_USED if not group and item.name in MOST_USED_FIELDS else PANELS[part],
        show_default=False,
        hidden=bool(group) and not item.setting.flat,
        parser=_reader_of(item) if is_number else None,
        metavar="BYTES" if item.setting.is_size else "<int>" if is_number else json_of,
    )
    kind = list[str] if item.is_list else str if item.is_group or item.is_mapping else item.type
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        parameter_name(item.name, group),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=annotation,
    )


_DOT = "__"
"""Replaces the dot of "group.field" in the names of Python parameters."""


def parameter_name(name: str, group: str = "") -> str:
    """Return the name of the Python parameter for a setting, or for a field of a group."""
    return f"{group}{_DOT}{name}" if group else name


def _help_of(item: DescribedSetting, default: str) -> str:
    """Return the help of a flag: what the setting means, its words or the fields of a group, and the default."""
    words = item.setting.words
    parts = [item.setting.sentence]
    if words:
        parts.append(f"One of: {', '.join(words)}.")
    if item.is_group:
        parts.append(_fields_of_group(item))
    if item.is_list:
        parts.append("May be repeated.")
    return " ".join(parts) + (f" (default: {default})" if default else "")


def _fields_of_group(item: DescribedSetting) -> str:
    """Say how the fields of a group are set, and list them unless they are many."""
    flag, first = flag_of(item.name), item.fields[0]
    how = f"Each field has its own flag, such as {flag}.{dashed(first.name)}"
    if len(item.fields) > _MOST_LISTED_FIELDS:
        return f"{how}."
    # With underscores, at which the help is not broken into lines; flags take them too.
    fields = ", ".join(f"{field.name} ({show_default(field)})" for field in item.fields)
    return f"{how}. Fields: {fields}."


_MOST_LISTED_FIELDS = 12


def _engine_parameters(parts: tuple[type, ...], of_server: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """Return the flags of these parts, and of these settings of a server."""
    settings = [(part, item) for part in parts for item in describe_settings(part)]
    settings += [(ServerConfig, item) for item in describe_settings(ServerConfig) if item.name in of_server]
    order = {name: index for index, name in enumerate(MOST_USED_FIELDS)}
    settings.sort(key=lambda pair: order.get(pair[1].name, len(order)))  # stable: the rest stays as declared
    flags: list[inspect.Parameter] = []
    for part, item in settings:
        flags.append(_parameter(part, item, show_default(item)))
        flags += [_parameter(part, field, show_default(field), group=item.name) for field in item.fields]
    return flags


def _sampling_parameters(defaults: dict[str, object]) -> list[inspect.Parameter]:
    """Return the flags of the sampling parameters that are documented."""
    return [
        _parameter(
            SamplingParams, item, show_default(dataclasses.replace(item, default=defaults.get(item.name, item.default)))
        )
        for item in describe_settings(SamplingParams)
    ]


def engine_options(*extra_parts: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every engine flag; it receives those that were given as `options: dict[str, object]`.

    extra_parts: further settings classes (ServerConfig).
    """
    parameters = [_model_word(), _config_parameter(), *_engine_parameters((*ENGINE_PARTS, *extra_parts))]
    return _collected("options", parameters)


def engine_flags(*of_server: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `engine_options`, for a command whose words are something else than the model.

    of_server: names of the server's settings that it takes, too.
    """
    return _collected("options", [_config_parameter(), *_engine_parameters(ENGINE_PARTS, of_server)])


def model_names() -> list[str]:
    """Return the models with a short name, for the shell's completion."""
    from pagoda.loading.catalog import CATALOG
    from pagoda.loading.known_names import KNOWN_NAMES

    return [*CATALOG, *KNOWN_NAMES]


def _model_word() -> inspect.Parameter:
    argument = typer.Argument(
        help="Same as --model.", metavar="MODEL", show_default=False, autocompletion=lambda: model_names()
    )
    kind = Annotated[str | None, argument]
    return inspect.Parameter(MODEL_WORD, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


MODEL_WORD = "model_word"
PROMPT = "prompt"
"""Names of the parameters that are words: the model in all commands of an engine, and in some a prompt after it."""


def _config_parameter() -> inspect.Parameter:
    """Return --config, which is read before the other flags (see pagoda.cli.arguments)."""
    option = typer.Option("--config", metavar="FILE", help="YAML or TOML file of settings, by their names.")
    kind = Annotated[str | None, option]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def sampling_options(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the sampling flags; it receives those that were given as `sampling: dict[str, object]`.

    defaults: shown in the help, with CLI_SAMPLING; the model's own come before them (see Session.params).
    """
    return _collected("sampling", _sampling_parameters({**CLI_SAMPLING, **defaults}))


def _collected(name: str, parameters: list[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that replaces the command's parameter `name` by flags, and gathers their values into it again."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {parameter.name: given.pop(parameter.name) for parameter in parameters}
            values.pop("config", None)
            word = values.pop(MODEL_WORD, None)
            if word is not None:
                values["model"] = word
            gathered = {
                key.replace(_DOT, "."): tuple(v) if isinstance(v, list) else v
                for key, v in values.items()
                if v is not None
            }
            command(**{name: gathered}, **given)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != name]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        signature = inspect.Signature(sorted([*own, *parameters], key=lambda p: p.name != MODEL_WORD))
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def engine_config(options: dict[str, object]) -> EngineConfig:
    """The flags that were given as settings."""
    return EngineConfig.from_options(**options)
