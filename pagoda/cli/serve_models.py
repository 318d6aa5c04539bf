"""The models of a server: the settings of each, from the command line and a file of tables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagoda.base.config import EngineConfig
from pagoda.base.config_options import option_names
from pagoda.base.errors import ConfigError
from pagoda.base.server_config import ServerConfig
from pagoda.cli.arguments import read_tables
from pagoda.cli.options import engine_config, flag_of

_FILES = (".toml", ".yaml", ".yml")
_OF_ONE_MODEL = ("model", "served_model_name", "lora_modules", "lora_sources", "lora_sources.lora_modules")
"""Settings that are the first model's alone, where they are not in a table."""
_IN_TABLES = ("tool_call_parser", "default_chat_template_kwargs", "lora_modules", "lora_dir")
"""Settings of the server that each model may have its own of."""


def model_configs(options: Mapping[str, object]) -> list[EngineConfig]:
    """Return the settings of each model to serve; the first has those of the server. Raises ConfigError.

    options: of the command line. They hold for all models, before what a table says of its own.
    """
    configs = [engine_config(one) for one in _options_of_each(options)]
    names = Counter(name for config in configs for name in config.model.names)
    if (twice := next((name for name, count in names.items() if count > 1), None)) is not None:
        raise ConfigError(f"two models are named {twice}: give them names of their own, as tables of a --models file")
    for name in ("api_server_count", "data_parallel_size") if len(configs) > 1 else ():
        if (value := getattr(configs[0].server, name)) > 1:
            raise ConfigError(
                f"{name}={value} goes with one model, and {len(configs)} are given: leave it out, or start a server "
                "for each model"
            )
    return configs


def _options_of_each(options: Mapping[str, object]) -> Iterator[dict[str, object]]:
    words = options.get("models") or ()
    words = [words] if isinstance(words, str) else list(words)  # type: ignore[call-overload]
    common = {name: value for name, value in options.items() if name != "models"}
    if "model" in options or not words:
        yield common
    else:
        common = {name: value for name, value in common.items() if name not in _OF_ONE_MODEL}
    of_others = {name: value for name, value in common.items() if name not in _OF_ONE_MODEL}
    for word in words:
        if not word.endswith(_FILES):
            yield {**of_others, "model": word}
            continue
        for table, own in read_tables(Path(word)).items():
            _check_table(word, table, own)
            yield {**of_others, "model": table, "served_model_name": (table,), **own}


def _check_table(path: str, table: str, own: Mapping[str, object]) -> None:
    of_server = option_names(ServerConfig)
    for name in own:
        field = name.rpartition(".")[2]
        if name in of_server and field not in _IN_TABLES:
            raise ConfigError(
                f"--models {path}: {table}: {name} is the whole server's; set it on the command line "
                f"({flag_of(field)}) or in --config"
            )
