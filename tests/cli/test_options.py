import dataclasses

import pytest
import typer

from pagoda.base.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
    ServerConfig,
)
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.flag_help import HELP
from pagoda.cli.options import (
    CLI_SAMPLING,
    SAMPLING_FIELDS,
    engine_config,
    engine_options,
    parse_bytes,
    sampling_options,
)

PARTS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, ServerConfig)


def run(*arguments: str, parts: tuple[type, ...] = ()) -> tuple[dict[str, object], dict[str, object]]:
    """What a command with engine and sampling flags receives."""
    received: list[tuple[dict[str, object], dict[str, object]]] = []
    app = typer.Typer()

    @app.command()
    @sampling_options(max_tokens=256)
    @engine_options(*parts)
    def command(options: dict[str, object], sampling: dict[str, object]) -> None:
        received.append((options, sampling))

    app(list(arguments), standalone_mode=False)
    return received[0]


def test_only_given_flags_arrive() -> None:
    assert run() == ({}, {**CLI_SAMPLING, "max_tokens": 256})


def test_flags_become_settings() -> None:
    options, sampling = run(
        *("--max-num-seqs", "3", "--no-enable-prefix-caching", "--scheduling-policy", "priority", "-m", "x"),
        *("--preemption-mode", "swap", "--kv-cache-memory", "1GiB", "--watermark", "0.5"),
        *("--temperature", "0.5", "--stop", "a", "--stop", "b", "--served-model-name", "n"),
    )
    config = engine_config(options)
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.scheduling_policy is SchedulingPolicy.PRIORITY
    assert config.scheduler.preemption_mode is PreemptionMode.SWAP
    assert config.cache == CacheConfig(kv_cache_memory=1 << 30, enable_prefix_caching=False, watermark=0.5)
    assert config.model == ModelConfig(model="x", served_model_name=("n",))
    assert sampling == {**CLI_SAMPLING, "max_tokens": 256, "temperature": 0.5, "stop": ("a", "b")}


def test_every_field_is_a_flag() -> None:
    """Whatever is added to the settings can be typed, in its own name."""
    app = typer.Typer()

    @app.command()
    @engine_options(ServerConfig)
    def command(options: dict[str, object]) -> None: ...

    flags = {flag for parameter in typer.main.get_command(app).params for flag in parameter.opts}
    fields = {item.name for part in PARTS for item in dataclasses.fields(part)}
    expected = {"--api-key" if name == "api_keys" else "--" + name.replace("_", "-") for name in fields}
    assert expected <= flags


def test_api_key_reaches_the_server_settings() -> None:
    options, _ = run("--api-key", "k1", "--api-key", "k2", parts=(ServerConfig,))
    assert engine_config(options).server.api_keys == ("k1", "k2")


def test_every_flag_has_help_and_no_help_lacks_its_flag() -> None:
    fields = {item.name for part in PARTS for item in dataclasses.fields(part)} | set(SAMPLING_FIELDS)
    assert set(HELP) == fields
    assert set(SAMPLING_FIELDS) <= {item.name for item in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 1 << 30),
        ("1GiB", 1 << 30),
        ("1G", 1 << 30),
        ("1.5 gib", 3 << 29),
        ("512MiB", 1 << 29),
        ("512k", 1 << 19),
        ("2GB", 2 * 10**9),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "1XiB", "-1", "1 2", "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_bytes(text)


def test_defaults_stay_the_engine_s() -> None:
    assert engine_config(run()[0]) == EngineConfig()
