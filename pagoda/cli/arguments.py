"""A command line before it is parsed: vLLM's spellings, and what the environment and a --config file say.

A setting is, in this order: its flag, the environment variable PAGODA_ and the flag's name, the --config file, its
default.
"""

import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagoda.base.config import PARTS
from pagoda.base.config_options import RETIRED, option_names
from pagoda.base.errors import ConfigError
from pagoda.base.registry import closest, nearest
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.vllm_options import SWITCHES, is_vllms, translate
from pagoda.cli.hints import FLAGS, instead
from pagoda.cli.options import MODEL_WORD, PROMPT, SAMPLING_FIELDS, flag_of, parameter_name

logger = logging.getLogger("pagoda")

PREFIX = "PAGODA_"
MODELS = "--models"
"""The flag of a command that takes several models, which words and flags after the first model mean."""
_SHORT_FLAGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
}
"""Flags of vLLM and llama.cpp that are spelled otherwise here."""
_ATTACHED = re.compile(r"(-O|-cc)[.=]?(.+)")
"""Short flags of vLLM whose value may follow without a space: -O3, -cc.mode=3."""
_OF_KUBERNETES = re.compile(r"PAGODA_(SERVICE_|PORT_\d)|PAGODA_PORT=(tcp|udp)://")
"""What Kubernetes sets in the containers next to a service that is named pagoda."""


def spelled_out(args: Sequence[str], flags: Mapping[str, Any], has_prompt: bool) -> tuple[list[str], set[str]]:
    """Return a command line as the parser takes it, and the names of the parameters whose flags are in it.

    flags: spelling -> parameter. Flags may have underscores. vLLM's are replaced or left out with a warning, and a
    setting of several values may have them all after one flag, once the model is known.
    has_prompt: the command takes a prompt, which a word after such a flag is then.
    Raises one ConfigError for all flags that are unknown or refused.
    """
    words, used = list(reversed(args)), set[str]()
    out: list[str] = []
    of_vllm: dict[str, Any] = {}
    problems: list[str] = []
    repeated: str | None = None  # the flag that further words would be values of
    takes_models = MODELS in flags
    knows_model = False
    while words:
        arg = words.pop()
        if arg == "--":
            out += [arg, *reversed(words)]
            break
        if attached := _ATTACHED.fullmatch(arg):
            arg = "=".join(attached.groups())
        name, equals, value = arg.partition("=")
        name = _SHORT_FLAGS.get(name, name) if name not in flags else name
        if name not in flags and name.replace("_", "-") in flags:
            name = name.replace("_", "-")
        if name in flags:
            if takes_models and knows_model and flags[name].name == "model":
                name = MODELS
            parameter = flags[name]
            used.add(parameter.name)
            knows_model |= parameter.name == "model" or name == MODELS
            out.append(name + equals + value)
            if not parameter.is_flag and not equals and words:
                out.append(words.pop())
            takes_words = parameter.multiple and not has_prompt and parameter.name not in SAMPLING_FIELDS
            repeated = name if takes_words else None
        elif not name.startswith("--") and name not in FLAGS:
            repeated = repeated or (MODELS if takes_models else None)
            out += [repeated, arg] if repeated and knows_model and not arg.startswith("-") else [arg]
            knows_model = True
        elif is_vllms(option := _option(name)) or is_vllms(option.removeprefix("no_")):
            option = option if is_vllms(option) else option.removeprefix("no_")
            if option in SWITCHES or equals or not words or words[-1].startswith("--"):
                of_vllm[option] = value or not _option(name).startswith("no_")
            else:
                of_vllm[option] = words.pop()
            repeated = None
        else:
            problems.append(_unknown(name, flags))
            if words and not equals and not words[-1].startswith("-"):
                words.pop()  # its value, it seems
    kept, refused = translate(of_vllm, flag_of)
    if problems or refused:
        raise ConfigError("; ".join([*problems, *refused]))
    return [word for name, value in kept.items() for word in (flag_of(name), str(value))] + out, used


def place_words(values: dict[str, Any], is_typed: bool, prefers_model: bool) -> None:
    """Make a single word the prompt, of a command that takes one, unless it names the model.

    values: of the parameters, by name, changed.   is_typed: --model is on the command line.
    prefers_model: without it, a word without spaces is the model. Raises ConfigError for two models.
    """
    from pagoda.loading.resolve import names_a_model

    word = values.get(MODEL_WORD)
    if word is None:
        return
    if PROMPT in values and values[PROMPT] is None:
        is_model = names_a_model(word) or (prefers_model and len(word.split()) == 1 and word != "-")
        if is_typed or not is_model:
            values[MODEL_WORD], values[PROMPT] = None, word
    elif is_typed:
        raise ConfigError(f"the model is given twice, as {word} and with --model")


def _option(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _unknown(flag: str, flags: Mapping[str, Any]) -> str:
    """Return the error for a flag that the command does not have."""
    field = _option(flag).rpartition(".")[2]
    gone = next((option for option in (field, field.removeprefix("no_")) if option in RETIRED), None)
    if gone is not None:
        return f"the flag {flag} is gone: {RETIRED[gone]}; leave it out"
    of_field = next((known for known in sorted(flags) if known.endswith("." + flag.removeprefix("--"))), None)
    if of_field:
        return f"{flag} is now {of_field}"
    return f"no such option: {flag}{instead(flag, FLAGS) or closest(flag, sorted(flags))}"


# ---- the environment and a file


def outer_values(
    parameters: Mapping[str, Any], used: set[str], path: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, object], dict[str, str]]:
    """Return what the environment says of a command's parameters, else a file, by their names; and where it is from.

    parameters: of the command, by name; settings of other commands are left out.   used: those on the command line.
    path: of the file; None: what PAGODA_CONFIG names, if it is set.
    Raises ConfigError for a file that cannot be read, or that has a setting which does not exist.
    """
    names = _settings()
    path = path or environ.get(f"{PREFIX}CONFIG")
    values: dict[str, object] = _file_values(Path(path).expanduser(), names) if path else {}
    sources = dict.fromkeys(values, f"--config {path}")
    by_variable = {PREFIX + _option(flag_of(name)).replace(".", "_").upper(): own for name, own in names.items()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or not text or _OF_KUBERNETES.match(f"{variable}={text}"):
            continue
        name = by_variable.get(variable)
        if name is not None:
            is_list = name in parameters and parameters[name].multiple and not text.startswith(("[", "{"))
            given = {name: text.split()} if is_list else _in_fields(name, text, names)
            values |= given
            sources |= dict.fromkeys(given, variable)
        elif variable != f"{PREFIX}CONFIG":
            logger.warning("the environment variable %s is no setting%s", variable, closest(variable, [*by_variable]))
    whole_groups = tuple(f"{name}__" for name in used)  # a group that is given as JSON replaces all its fields
    found: dict[str, object] = {}
    for name, value in values.items():
        if name in parameters and not name.startswith(whole_groups):
            found[name] = _for_parser(parameters[name], value)
    return found, {name: sources[name] for name in found}


def _settings() -> dict[str, str]:
    """Return every name of a setting -> the name of its parameter."""
    names: dict[str, str] = {}
    for part in (*PARTS.values(), SamplingParams):
        for name, (item, group) in option_names(part).items():
            names[name] = parameter_name(item.name, group.name if group is not None else "")
    return names


def _file_values(path: Path, names: Mapping[str, str]) -> dict[str, object]:
    """Read a file of settings; groups are objects."""
    given = _read_file(path, "--config")
    if not isinstance(given, dict):
        raise ConfigError(f"--config {path}: expected settings by name, such as `port: 8000`")
    return _settings_of(given, f"--config {path}", names)


def _read_file(path: Path, flag: str) -> object:
    """Read a file, YAML unless its name ends in .toml. Raises ConfigError."""
    import yaml

    try:
        text = path.read_text()
        return tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag} {path}: {' '.join(str(error).split())}") from None


def _settings_of(given: Mapping[Any, Any], source: str, names: Mapping[str, str]) -> dict[str, object]:
    """Return settings by the names of their parameters.   source: where they are from, for errors."""
    options, problems = translate({str(key).replace("-", "_"): value for key, value in given.items()})
    spelled = {_option(flag_of(name)): name for name in names}
    values: dict[str, object] = {}
    for name, value in options.items():
        own = names.get(name) or names.get(spelled.get(name, ""))
        if own is None:
            problems.append(f"unknown setting {name}{nearest(name, [*names])}")
        elif value is not None:
            values |= _in_fields(own, value, names)
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return values


def read_settings(path: Path) -> dict[str, object]:
    """Return the settings in a file by the names that `EngineConfig.from_options` takes. Raises ConfigError."""
    return _as_options(_file_values(path.expanduser(), _settings()))


def read_tables(path: Path) -> dict[str, dict[str, object]]:
    """Return the settings in each table of a file, as `read_settings`, by the table's name. Raises ConfigError."""
    tables = _read_file(path.expanduser(), MODELS)
    if not isinstance(tables, dict) or not tables or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(f"{MODELS} {path}: expected a table of settings for each model, such as [chat]")
    names = _settings()
    return {str(key): _as_options(_settings_of(one, f"{MODELS} {path}: {key}", names)) for key, one in tables.items()}


def _as_options(values: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in values.items() if name not in SAMPLING_FIELDS}


def _in_fields(name: str, value: object, names: Mapping[str, str]) -> dict[str, object]:
    """Return the value of a parameter by its name, a group's by the names of its fields."""
    fields = {own.partition("__")[2]: own for own in names.values() if own.startswith(f"{name}__")}
    if fields and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {name: value}  # the error says what a group looks like
    if not fields or not isinstance(value, dict):
        return {name: value}
    found = {fields.get(str(key).replace("-", "_")): one for key, one in value.items()}
    return {name: json.dumps(value)} if None in found else found  # type: ignore[return-value]


def _for_parser(parameter: Any, value: object) -> object:
    """Return a value as the parser takes it: strings of a list one by one, anything nested as JSON."""
    if parameter.multiple:
        return value if isinstance(value, list) else [value]
    return json.dumps(value) if isinstance(value, dict | list) else value
