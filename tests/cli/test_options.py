import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from pagoda.base.config import (
    CacheConfig,
    DebugConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    PreemptionMode,
    PrefillConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from pagoda.base.config_options import option_names, parse_size
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.lora import LoRAConfig, LoRASources
from pagoda.base.server_config import ServerConfig, ServerLimits, ServerTimeouts
from pagoda.base.setting import describe_settings
from pagoda.base.vllm_options import ALIASES, GUARDS, IGNORED, REFUSED, SWITCHES, translate
from pagoda.cli.help_format import command as register
from pagoda.cli.options import (
    SAMPLING_FIELDS,
    engine_config,
    engine_options,
    flag_of,
    sampling_options,
)
from pagoda.cli.serve import with_key_file, with_vllms_key

PARTS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, ServerConfig, DebugConfig)


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


def test_only_flags_that_were_given_are_passed_on() -> None:
    assert run() == ({}, {})


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
    assert sampling == {"temperature": 0.5, "stop": ("a", "b")}


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


def test_every_setting_is_documented_where_it_is_declared() -> None:
    for part in (*PARTS, PrefillConfig, LoRAConfig, LoRASources, ServerLimits, ServerTimeouts):
        described = describe_settings(part)
        assert [item.name for item in described] == [item.name for item in dataclasses.fields(part)]
        for item in described:
            assert re.fullmatch(r".{15,240}\.", item.setting.text), item.name
            assert not item.optional or item.setting.unset, f"{item.name}: what does None mean?"
    assert len(SAMPLING_FIELDS) == 10


def test_there_are_at_most_70_settings_for_users() -> None:
    """Each option of an engine or a server counts; a group counts once, and so does every option for tests apart."""
    assert sum(len(describe_settings(part)) for part in PARTS if part is not DebugConfig) <= 70


def test_groups_are_set_by_field_or_as_json() -> None:
    options, _ = run(
        *("--prefill.prefill-beside-decodes", "8", "--prefill.no-admit-whole-prompt"),
        *("--server-timeouts", '{"drain_timeout_s": 0.5}'),
        *("--server-timeouts.step-timeout-s", "2", "--server-limits.max-body-bytes", "2MiB"),
        parts=(ServerConfig,),
    )
    config = engine_config(options)
    assert config.scheduler.prefill == PrefillConfig(prefill_beside_decodes=8, admit_whole_prompt=False)
    assert config.server.server_timeouts == ServerTimeouts(drain_timeout_s=0.5, step_timeout_s=2.0)
    assert config.server.server_limits == ServerLimits(max_body_bytes=2 << 20)


@pytest.mark.parametrize(
    "given",
    [
        {"server_limits": {"max_connections": 3}},
        {"server_limits": ServerLimits(max_connections=3)},
        {"server_limits": '{"max_connections": 3}'},
        {"server_limits.max_connections": 3},
    ],
    ids=str,
)
def test_forms_of_a_group_in_python(given: dict[str, Any]) -> None:
    config = EngineConfig.from_options(**given)
    assert config.server.server_limits == ServerLimits(max_connections=3)
    assert config.given is not None
    assert "server_limits" in config.given


def test_names_of_vllm_stay_flat() -> None:
    options, _ = run(
        *("--max-num-partial-prefills", "2", "--long-prefill-token-threshold", "64"),
        *("--scheduler-delay-factor", "0.5", "--max-logprobs", "3"),
    )
    config = engine_config(options)
    expected = PrefillConfig(max_num_partial_prefills=2, long_prefill_token_threshold=64, scheduler_delay_factor=0.5)
    assert config.scheduler.prefill == expected
    assert config.model.request_limits.max_logprobs == 3
    flat = EngineConfig.from_options(max_num_partial_prefills=2, prefill={"admit_whole_prompt": False}, max_logprobs=3)
    assert flat.scheduler.prefill == PrefillConfig(max_num_partial_prefills=2, admit_whole_prompt=False)
    assert flat.given == ("max_logprobs", "max_num_partial_prefills", "prefill", "request_limits")


FLAGS_OF_0_1 = Path(__file__).with_name("settings_before_groups.txt").read_text().split()
"""The settings before they were grouped, each of which was a flag."""


@pytest.mark.parametrize("name", FLAGS_OF_0_1)
def test_flags_of_earlier_versions_work_or_say_what_replaced_them(name: str) -> None:
    flag = flag_of(name)
    message = say_about(f"{flag}=1")
    if message is None:
        return
    moved = re.fullmatch(rf"{flag} is now (--[a-z-]+\.[a-z-]+)", message)
    if moved:
        assert say_about(f"{moved[1]}=1") is None or say_about(moved[1]) is None
        with pytest.raises(ConfigError, match=f"{name} is a field of"):
            EngineConfig.from_options(**{name: 1})
    else:
        assert re.fullmatch(rf"the flag {flag} is gone: .*; leave it out", message)
        with pytest.raises(ConfigError, match=f"the option {name} is gone: .*; leave it out"):
            EngineConfig.from_options(**{name: 1})


def serve_with(*arguments: str) -> dict[str, object]:
    """What `pagoda serve` receives."""
    received: list[dict[str, object]] = []
    app = typer.Typer()

    @register(app, "serve")
    @engine_options(ServerConfig)
    def serve(options: dict[str, object]) -> None:
        received.append(options)

    app(list(arguments), standalone_mode=False)
    return received[0]


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PAGODA_")]:
        monkeypatch.delenv(name)


def test_a_pasted_vllm_command_line_works(caplog: pytest.LogCaptureFixture) -> None:
    """The words of README files and recipes: other names, lists after one flag, flags without a meaning here."""
    options = serve_with(
        *("Org/Model", "--served-model-name", "a", "b", "--trust-remote-code", "--enable-auto-tool-choice"),
        *("--disable-log-requests", "-tp", "1", "--max-model-len", "4k", "--download_dir=/models"),
        *("--reasoning-parser", "qwen3", "--structured-outputs-config.backend", "xgrammar", "--enforce-eager"),
        *("--allowed-origins", '["*"]', "--shutdown-timeout", "5", "--enable-lora", "--max-cpu-loras", "2"),
        *("--cuda-graph-sizes", "1", "--api-key", "k1", "k2"),
    )
    config = engine_config(options)
    assert (config.model.model, config.model.served_model_name) == ("Org/Model", ("a", "b"))
    assert (config.model.max_model_len, config.model.cache_dir) == (4000, "/models")
    assert (config.server.api_keys, config.server.cors_origins) == (("k1", "k2"), ("*",))
    assert config.server.server_timeouts.drain_timeout_s == 5
    assert (config.model.lora.num_per_step, config.model.lora.num_kept) == (2, 2)
    check_settings(config)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("no effect here: --trust-remote-code (code from a model repository is never run); ")
    for flag in ("--enable-auto-tool-choice", "--disable-log-requests", "--reasoning-parser", "--cuda-graph-sizes"):
        assert flag in warning
    assert "always uses llguidance, there is no xgrammar" in warning


def test_everything_that_is_refused_is_said_at_once() -> None:
    words = ["m", "--rope-theta", "3", "--middleware=x", "--max-num-sequ", "3", "--no-such", "--enforce-eager"]
    with pytest.raises(ConfigError) as caught:
        serve_with(*words)
    for part in (
        "--rope-theta of vLLM is not supported: edit config.json",
        "--middleware of vLLM is not supported: set it in a proxy",
        "no such option: --max-num-sequ; did you mean '--max-num-seqs'?",
        "no such option: --no-such",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="rope_theta of vLLM .*; logits_processors of vLLM|unknown option no_such"):
        EngineConfig.from_options(rope_theta=1, logits_processors=[len], no_such=1)


def test_neutral_values_of_what_is_refused_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    words = ("--node-rank", "0", "--no-enable-sleep-mode", "--allowed-methods", '["*"]', "--nnodes=1")
    assert serve_with(*words) == {}
    config = EngineConfig.from_options(rope_scaling=None, tokens_only=False, allowed_headers=["*"], hf_token=None)
    assert config == EngineConfig.from_options()
    assert caplog.text == ""


@pytest.mark.parametrize(
    "words",
    ["--enable-sleep-mode", '--allowed-methods ["GET"]', "--allow-credentials"],
)
def test_sleep_and_restrictions_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words.split()[0]} of vLLM is not supported: "):
        serve_with(*words.split())


def test_options_of_vllm_in_python(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.for_engine(trust_remote_code=True, enforce_eager=True, download_dir="/x", max_model_len="4K")
    assert (config.model.cache_dir, config.model.max_model_len) == ("/x", 4096)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    auto = EngineConfig.from_options(max_model_len="auto")
    assert (auto.model.max_model_len, auto.given) == (None, ())
    for number in (-1, "-1"):
        assert EngineConfig.from_options(max_model_len=number) == auto
    with pytest.raises(ConfigError, match="download_dir and cache_dir mean the same"):
        EngineConfig.from_options(download_dir="/x", cache_dir="/y")


def test_what_is_said_about_vllm_names_only_settings_that_exist() -> None:
    known = {"no_access_log"} | {name for part in PARTS for name in option_names(part)}
    spelled: set[str] = set()
    for option in (*IGNORED, *REFUSED):
        assert option not in known, f"{option} is a setting now: remove what is said about it"
        translate({option: 1}, lambda name: spelled.add(name) or name)
    assert spelled - {*IGNORED, *REFUSED} <= known
    assert set(ALIASES.values()) <= known
    assert not set(ALIASES) & known
    assert {*IGNORED, *REFUSED} >= SWITCHES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-len", "4x"], "'4x' is not an integer; write one, or a number with k"),
    ],
    ids=str,
)
def test_words_that_cannot_be_read(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, typer.TyperException)) as caught:
        serve_with(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["a", "b", "c.toml"],
        ["--model", "a", "-m", "b", "--models", "c.toml"],
        ["a", "--model=b", "--port", "1", "c.toml"],
        ["-m", "a", "b", "--models=c.toml"],
    ],
    ids=str,
)
def test_models_after_the_first_are_further_ones(words: list[str]) -> None:
    options = serve_with(*words)
    assert (options["model"], options["models"]) == ("a", ("b", "c.toml"))


# ---- flag, environment, file, default


def test_one_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A flag, else the environment, else the file, else the default; fields of groups one by one."""
    file = tmp_path / "pagoda.yaml"
    file.write_text(
        "model: from-file\nport: 1\nmax-num-seqs: 7\nblock_size: 32\napi-key: [f1, f2]\nenable_prefix_caching: false\n"
        "server_limits: {max_connections: 5, max_body_bytes: 2MiB}\nkv_cache_memory: 1GiB\ntrust-remote-code: true\n"
    )
    for name, value in {
        "PORT": "2",
        "MAX_NUM_SEQS": "8",
        "API_KEY": "e1 e2",
        "SERVER_LIMITS_MAX_CONNECTIONS": "6",
        "ENABLE_LORA": "true",
        "TEMPERATURE": "0.5",  # of other commands
    }.items():
        monkeypatch.setenv(f"PAGODA_{name}", value)
    config = engine_config(serve_with("--config", str(file), "--port", "3"))
    assert (config.server.port, config.scheduler.max_num_seqs, config.cache.block_size) == (3, 8, 32)
    assert (config.model.model, config.server.api_keys) == ("from-file", ("e1", "e2"))
    assert config.server.server_limits == ServerLimits(max_connections=6, max_body_bytes=2 << 20)
    assert config.model.lora.enable_lora
    assert not config.cache.enable_prefix_caching
    assert config.cache.kv_cache_memory == 1 << 30
    assert "no effect here: trust_remote_code" in caplog.text
    assert engine_config(serve_with("word", "--config", str(file))).model.model == "word"
    limits = engine_config(serve_with("--config", str(file), "--server-limits", '{"max_body_bytes": 9}')).server
    assert limits.server_limits == ServerLimits(max_body_bytes=9)
    monkeypatch.setenv("PAGODA_CONFIG", str(file))
    assert engine_config(serve_with()).cache.block_size == 32


def test_a_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "pagoda.toml"
    file.write_text('served_model_name = "a"\n[speculative_config]\nmethod = "ngram"\nnum_speculative_tokens = 3\n')
    config = engine_config(serve_with("--config", str(file)))
    assert config.model.served_model_name == ("a",)
    assert (config.scheduler.speculative_config.method, config.scheduler.speculative_config.num_speculative_tokens) == (
        "ngram",
        3,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_sqs: 3\nrope_theta: 3", "unknown setting max_num_sqs; did you mean 'max_num_seqs'?"),
        ("max_num_sqs: 3\nrope_theta: 3", "rope_theta of vLLM is not supported"),
        ("port: [", "while parsing"),
        ("just words", "expected settings by name, such as `port: 8000`"),
        ("server_limits: {max_connection: 1}", "did you mean 'max_connections'"),
        ("port: many", "'many' is not an integer"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises((ConfigError, typer.TyperException)) as caught:
        engine_config(serve_with("--config", str(file)))
    assert message in str(caught.value)


def test_what_kubernetes_sets_for_a_service_named_pagoda_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGODA_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("PAGODA_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PAGODA_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    assert serve_with() == {}
    assert caplog.text == ""
    monkeypatch.setenv("PAGODA_PROT", "1")
    serve_with()
    assert "PAGODA_PROT is no setting; did you mean 'PAGODA_PORT'?" in caplog.text


def test_only_the_environment_s_strings_are_separated_by_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("served_model_name: the model\napi_key: [a b]\n")
    assert serve_with("--config", str(file)) == {"served_model_name": ("the model",), "api_keys": ("a b",)}
    monkeypatch.setenv("PAGODA_SERVED_MODEL_NAME", "a b")
    assert serve_with()["served_model_name"] == ("a", "b")


def test_a_key_is_in_no_error() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(api_keys=["[secret"])
    assert str(caught.value) == "api_keys is not a JSON list"


def test_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nk1\n\n k2 \n")
    config = with_key_file(engine_config(serve_with("--api-key", "k0", "--api-key-file", str(file))))
    assert config.server.api_keys == ("k0", "k1", "k2")
    file.write_text("\n")
    for name, message in ((file, "has no key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            with_key_file(engine_config(serve_with("--api-key-file", str(name))))


def say_about(*arguments: str) -> str | None:
    """Return the error that `pagoda serve` gives for these words alone; None if their flag is known."""
    app = typer.Typer()

    @register(app, "serve")
    @engine_options(ServerConfig)
    def serve(options: dict[str, object]) -> None: ...

    with contextlib.suppress(typer.TyperException):
        try:
            app(list(arguments), standalone_mode=False)
        except ConfigError as error:
            return str(error)
    return None


def test_flags_may_be_written_with_underscores() -> None:
    received: list[dict[str, object]] = []
    app = typer.Typer()

    @register(app, "serve")
    @engine_options(ServerConfig)
    def serve(options: dict[str, object]) -> None:
        received.append(options)

    words = ["--max_num_seqs", "3", "--server_limits.max_connections=4", "--served-model-name", "--no_such"]
    app(words, standalone_mode=False)
    expected = {"max_num_seqs": 3, "server_limits.max_connections": 4, "served_model_name": ("--no_such",)}
    assert received == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "admit_whole_prompt=1"}, "is not JSON: write --prefill.admit-whole-prompt VALUE"),
        (
            {"prefill": {"admit_whole_promt": True}},
            "prefill has no 'admit_whole_promt'; did you mean 'admit_whole_prompt'",
        ),
        ({"prefill.admit_whole_promt": True}, "did you mean 'prefill.admit_whole_prompt'"),
        ({"server_limits": {"max_body_bytes": "many"}}, "max_body_bytes: 'many' is not a size"),
        ({"server_limits": 3}, "server_limits=3 must map names to values"),
        ({"server_limits": "[3]"}, "server_limits=[3] must map names to values"),
        ({"prefill_beside_decodes": 3}, "a field of prefill: write prefill={'prefill_beside_decodes': ...}"),
        (
            {"max_num_partial_prefills": 3, "prefill": {"max_num_partial_prefills": 2}},
            "prefill.max_num_partial_prefills is given twice, as 2 and as 3",
        ),
        (
            {"max_num_partial_prefills": 3, "prefill": {"max_num_partial_prefills": 0}},
            "prefill.max_num_partial_prefills is given twice, as 0 and as 3",
        ),
    ],
    ids=str,
)
def test_invalid_values_of_a_group_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_limits.max_connections": 3.5}, "server_limits.max_connections=3.5 must be an integer"),
        ({"server_timeouts": {"drain_timeout_s": True}}, "server_timeouts.drain_timeout_s=True must be a number"),
        ({"server_limits": {"max_connections": -1}}, "server_limits.max_connections=-1 must be at least 0"),
    ],
    ids=str,
)
def test_values_in_groups_are_checked_by_their_whole_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(EngineConfig.from_options(**options))
    assert message in str(caught.value)


def test_server_options_are_refused_in_an_engine() -> None:
    for name in ("port", "server_limits", "server_limits.max_connections"):
        with pytest.raises(ConfigError, match=f"{name} is an option of `pagoda serve`"):
            EngineConfig.for_engine(**{name: 1})


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
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "1XiB", "-1", "1 2", "GiB", "٣", "1_0"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_defaults_stay_the_engine_s() -> None:
    assert engine_config(run()[0]) == EngineConfig()


def test_variables_of_vllm_that_protect_a_server_are_honoured_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(serve_with())
    assert with_vllms_key(config, {"VLLM_API_KEY": "k"}).server.api_keys == ("k",)
    assert with_vllms_key(config, {"VLLM_API_KEY": "", "VLLM_PORT": "tcp://1.2.3.4:1"}).server.api_keys == ()
    own = engine_config(serve_with("--api-key", "own"))
    assert with_vllms_key(own, {"VLLM_API_KEY": "k"}).server.api_keys == ("own",)
    assert caplog.messages == []
    for name in GUARDS:
        with pytest.raises(ConfigError, match=name):
            with_vllms_key(config, {name: "1"})
    with_vllms_key(config, {"VLLM_LOGGING_LEVEL": "DEBUG"})
    assert caplog.messages == ["environment variables of vLLM that have no effect here: VLLM_LOGGING_LEVEL"]


@pytest.mark.parametrize("given", ["localhost", "1.2.3", "10.0.0.1/8", "6.6.6.6 key=admin"])
def test_trusted_proxies_are_addresses(given: str) -> None:
    with pytest.raises(ConfigError, match="must be an IP address"):
        check_settings(engine_config(serve_with("--forwarded-allow-ips", given)))
    check_settings(engine_config(serve_with("--forwarded-allow-ips", "10.0.0.0/8,::1")))
