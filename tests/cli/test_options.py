import dataclasses
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
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.lora import LoRAConfig, LoRASources
from pagoda.base.server_config import ServerConfig, ServerLimits, ServerTimeouts
from pagoda.base.setting import describe_settings
from pagoda.base.vllm_options import VLLM_ANSWERS, answer_for_vllm
from pagoda.cli.help_format import command as register
from pagoda.cli.options import (
    CLI_SAMPLING,
    SAMPLING_FIELDS,
    engine_config,
    engine_options,
    flag_of,
    parse_bytes,
    sampling_options,
)

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


def test_every_setting_is_documented_where_it_is_declared() -> None:
    for part in (*PARTS, PrefillConfig, LoRAConfig, LoRASources, ServerLimits, ServerTimeouts):
        described = describe_settings(part)
        assert [item.name for item in described] == [item.name for item in dataclasses.fields(part)]
        for item in described:
            assert re.fullmatch(r".{15,140}\.", item.setting.text), item.name
            assert not item.optional or item.setting.unset, f"{item.name}: what does None mean?"
    assert len(SAMPLING_FIELDS) == 10


def test_there_are_at_most_53_settings_for_users() -> None:
    """Each option of an engine or a server counts; a group counts once, and so does every option for tests apart."""
    assert sum(len(describe_settings(part)) for part in PARTS if part is not DebugConfig) <= 53


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


@pytest.mark.parametrize(
    "name",
    [
        *("trust_remote_code", "enforce_eager", "download_dir", "num_gpu_blocks_override"),
        *("guided_decoding_backend", "structured_outputs_config", "structured_outputs_config.backend"),
    ],
)
def test_flags_of_vllm_are_refused_with_an_answer(name: str) -> None:
    flag = flag_of(name)
    known = re.escape(f"pagoda does not have vLLM's flag {flag}: ")
    assert re.fullmatch(known + r"(use --.+|.+; leave it out)", say_about(flag) or "")
    with pytest.raises(
        ConfigError, match=rf"pagoda does not have vLLM's option {name}: (use [a-z_]+|.+; leave it out)"
    ):
        EngineConfig.from_options(**{name: True})


@pytest.mark.parametrize("flag", ["--guided-decoding-backend", "--structured-outputs-config.backend"])
def test_a_grammar_library_of_vllm_is_refused_by_its_name(flag: str) -> None:
    for words in ([flag, "xgrammar"], [f"{flag}=xgrammar"]):
        assert "always uses llguidance, there is no xgrammar" in (say_about(*words) or "")
    with pytest.raises(ConfigError, match="always uses llguidance, there is no xgrammar"):
        EngineConfig.from_options(structured_outputs_config={"backend": "xgrammar"})


def test_an_answer_to_vllm_names_only_settings_that_exist() -> None:
    known = {"no_access_log"} | {item.name for part in PARTS for item in describe_settings(part)}
    flat = {"max_num_partial_prefills", "pooling_type"}
    spelled: set[str] = set()
    for option in VLLM_ANSWERS:
        assert option not in known, f"{option} is a setting now: remove its answer"
        answer_for_vllm(option, lambda name: spelled.add(name) or name)
    assert spelled <= known | flat
    assert answer_for_vllm("max_num_seqs", str) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "Org/Model"], "give the model with -m"),
        (["serve", "--served-model-name", "a", "b"], "repeat a flag to give it several values"),
        (["serve", "-tp", "2"], "write --tensor-parallel-size for -tp"),
        (["serve", "--no-enable-log-requests"], "--no-enable-log-requests: --access-log controls"),
    ],
    ids=str,
)
def test_a_pasted_vllm_command_line_gets_answers(words: list[str], message: str) -> None:
    app = typer.Typer()

    @register(app, "serve")
    @engine_options(ServerConfig)
    def serve(options: dict[str, object]) -> None: ...

    @register(app, "other")
    def other() -> None: ...

    with pytest.raises(ConfigError, match=message):
        app(words, standalone_mode=False)


def say_about(*arguments: str) -> str | None:
    """Return the error that `pagoda serve` gives for these words alone; None if their flag is known."""
    app = typer.Typer()

    @register(app, "serve")
    @engine_options(ServerConfig)
    def serve(options: dict[str, object]) -> None: ...

    try:
        app(list(arguments), standalone_mode=False)
    except ConfigError as error:
        return str(error)
    except typer.TyperException as error:
        unknown = "No such option" in error.format_message()
        return error.format_message() if unknown else None
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
        ({"server_limits.max_connections": "3"}, "server_limits.max_connections='3' must be an integer"),
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
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "1XiB", "-1", "1 2", "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_bytes(text)


def test_defaults_stay_the_engine_s() -> None:
    assert engine_config(run()[0]) == EngineConfig()
