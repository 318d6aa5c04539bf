"""Settings in, engine out: what is derived, and what is refused."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from pagoda.assembly import assemble
from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine, scheduler_options
from pagoda.assembly.sizing import size_cache
from pagoda.base.config import PARTS, EngineConfig, ModelConfig, PrefillConfig, SchedulerConfig, SchedulingPolicy
from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.setting import describe_settings
from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.engine.executor import Executor
from pagoda.kernels import select
from pagoda.loading.fetch_hub import SOURCES
from pagoda.loading.model_files import ModelFiles
from tests.engine.driver import drive, request, write_tiny_llama
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config(model: Path, **options: object) -> EngineConfig:
    base = {"device": "cpu", "threads": 1, "block_size": 8, "kernels": "torch"}
    return EngineConfig.from_options(model=str(model), **{**base, **options})


def test_unset_options_are_derived(model: Path) -> None:
    setup = resolve_engine(config(model))
    assert setup.max_model_len == 512 == setup.config.model.max_model_len
    assert (setup.dtype, setup.kv_dtype, setup.device.name) == ("float32", "float32", "cpu")
    assert resolve_engine(config(model, dtype="bfloat16", kv_cache_dtype="int8")).kv_dtype == "int8"
    assert resolve_engine(config(model, kv_cache_dtype="bfloat16")).kv_dtype == "bfloat16"  # torch's kernels cast
    assert resolve_engine(config(model, max_model_len=100)).max_model_len == 100
    assert resolve_engine(setup.config).config == setup.config  # resolving twice changes nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 must be in 1 .. 512"),
        ({"max_model_len": 0}, "max_model_len=0"),
        (
            {"max_num_batched_tokens": 255, "max_num_seqs": 256},
            "max_num_batched_tokens=255 is less than max_num_seqs=256",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 500, "max_model_len": 512},
            "without chunked prefill",
        ),
        ({"device": "cude"}, "did you mean 'cuda'"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'"),
        ({"block_size": 0}, "block_size=0"),
        ({"pipeline_depth": 0}, "pipeline_depth=0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"swap_space": -1.0}, "swap_space"),
        ({"watermark": 1.0}, "watermark"),
        ({"threads": 0}, "threads=0"),
        ({"distributed_executor_backend": "in_proces"}, "did you mean 'in_process'"),
        (
            {"dtype": "float32", "kv_cache_dtype": "bfloat16", "kernels": "auto"},
            "kv_cache_dtype='bfloat16' with dtype='float32'",
        ),
        ({"dtype": "bf16", "kv_cache_dtype": "float16", "kernels": "native"}, "take 'auto' or 'int8'"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory: 'much' is not a size"),
        ({"max_num_seqs": "x" * 5000}, "(5000 characters) is not an integer"),
        ({"kernels": "nativ"}, "did you mean 'native'"),
        ({"source": "huggingfaces"}, "did you mean 'huggingface'"),
        ({"quantization": "int4"}, "did you mean 'int8'"),
        ({"quantization": "fp8", "device": "cpu", "kernels": "auto"}, "quantization='fp8' needs a GPU"),
        ({"kv_cache_dtype": "fp8_e4m3", "device": "cpu", "kernels": "auto"}, "kv_cache_dtype='fp8' with dtype="),
        ({"revision": "main"}, "revision='main' is for hub models"),
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"num_host_blocks": -1}, "num_host_blocks=-1"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory=1.5 must be an integer"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5 must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be an integer"),
        ({"max_num_seqs": 1 << 64}, "max_num_seqs=18446744073709551616 must be less than 18446744073709551616"),
        ({"prefix_hash_seed": 1 << 64}, "prefix_hash_seed must be less than 18446744073709551616"),
        ({"prefix_hash_seed": -(1 << 63) - 1}, "prefix_hash_seed must be less than"),
        ({"prefix_hash_seed": 1.5}, "prefix_hash_seed must be an integer"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"watermark": float("nan")}, "watermark=nan"),
        ({"prefill": {"scheduler_delay_factor": -1.0}}, "scheduler_delay_factor"),
        ({"server_timeouts": {"drain_timeout_s": -1}}, "drain_timeout_s=-1 must be at least 0"),
        ({"preemption_mode": "swop"}, "preemption_mode='swop' is not one of"),
        ({"port": 70000}, "port=70000"),
        ({"served_model_name": 5}, "served_model_name=5 must be strings"),
        ({"tokenizer": 5}, "tokenizer=5 must be a string"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(model: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_engine(config(model, **options))
    assert message in str(caught.value)


def test_every_number_of_the_settings_has_a_range_or_needs_none() -> None:
    """A new numeric setting declares its smallest value, or is named here and checked elsewhere."""
    elsewhere = {"max_model_len", "seed", "prefix_hash_seed", "gpu_memory_utilization", "watermark"}
    groups = [item.type for kind in PARTS.values() for item in describe_settings(kind) if item.is_group]
    for kind in (*PARTS.values(), *groups):
        numbers = {item.name for item in describe_settings(kind) if item.type in (int, float)}
        ranged = {item.name for item in describe_settings(kind) if item.setting.at_least is not None}
        assert numbers - elsewhere == ranged


def test_allowed_words_are_those_that_the_parts_accept() -> None:
    words = {item.name: item.setting.words for kind in PARTS.values() for item in describe_settings(kind)}
    assert set(words["kernels"]) == set(select.NAMES)
    assert set(words["source"]) == set(SOURCES)
    assert set(words["kv_cache_dtype"]) == {"auto", *DTYPE_BYTES}


def test_steps_of_a_gpu_have_more_tokens(model: Path) -> None:
    def tokens(**options: Any) -> int:
        setup = resolve_engine(config(model, **options))
        assert resolve_engine(setup.config).config == setup.config
        return setup.config.scheduler.max_num_batched_tokens

    assert (tokens(), tokens(device="cuda")) == (2048, 8192)
    assert tokens(device="cuda", max_num_batched_tokens=2048) == 2048
    assert tokens(device="cuda", max_num_seqs=9000) == 9000


def test_the_schedulers_options_derive_from_the_settings() -> None:
    assert scheduler_options(EngineConfig()) == SchedulerOptions()
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"async_scheduling": True}, {"async_scheduling": True, "pipeline_depth": 2}),
        ({"async_scheduling": True, "pipeline_depth": 3}, {"async_scheduling": True, "pipeline_depth": 3}),
        ({"prefill": {"prefill_beside_decodes": 8}}, {"prefill_beside_decodes": 8}),
        ({"decision_log_steps": 4, "prefix_hash_seed": 1}, {"decision_log_steps": 4, "prefix_hash_seed": 1}),
        ({"scheduling_policy": "priority"}, {"scheduling_policy": SchedulingPolicy.PRIORITY}),
    )
    for options, expected in cases:
        assert scheduler_options(EngineConfig.from_options(**options)) == SchedulerOptions(**expected)


def test_options_are_taken_as_people_write_them(model: Path) -> None:
    made = EngineConfig.from_options(model=model, served_model_name="tiny", api_keys=["a", "b"])
    assert made.model.model == str(model)
    assert (made.model.served_model_name, made.server.api_keys) == (("tiny",), ("a", "b"))


def test_values_as_on_the_command_line(model: Path) -> None:
    made = EngineConfig.from_options(kv_cache_memory="1.5GiB", dtype="half", kv_cache_dtype="bf16")
    assert (made.cache.kv_cache_memory, made.model.dtype, made.cache.kv_cache_dtype) == (3 << 29, "float16", "bfloat16")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_num_batched_tokens": 64}, {"max_num_seqs": 64}),
        ({"max_num_seqs": 4096}, {"max_num_batched_tokens": 4096}),
        ({"enable_chunked_prefill": False, "max_num_seqs": 8}, {"max_num_batched_tokens": 2048}),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, {"max_model_len": 100, "max_num_seqs": 100}),
        ({"block_size": 12, "kernels": "auto"}, {"kernels": "torch"}),
        ({"block_size": 16, "kernels": "auto"}, {"kernels": "auto"}),
        ({"kv_cache_dtype": "bfloat16", "kernels": "auto"}, {"dtype": "bfloat16"}),
        ({"kv_cache_dtype": "int8", "kernels": "auto"}, {"dtype": "float32"}),
    ],
    ids=str,
)
def test_defaults_yield_to_options_that_were_given(
    model: Path, options: dict[str, object], expected: dict[str, object]
) -> None:
    setup = resolve_engine(config(model, **options))
    parts = [getattr(setup.config, part) for part in PARTS]
    settings = {item.name: getattr(part, item.name) for part in parts for item in dataclasses.fields(part)}
    assert {name: settings[name] for name in {**expected, **options}} == {**options, **expected}
    assert resolve_engine(setup.config).config == setup.config


def test_one_setting_alone_never_contradicts_a_default(model: Path) -> None:
    """Each numeric setting of the engine at small and large values, alone: what is refused is refused by its name."""
    kinds = [kind for part, kind in PARTS.items() if part != "server"]
    settings = [(item, {}) for kind in kinds for item in describe_settings(kind)]
    settings += [(item, {"group": "prefill"}) for item in describe_settings(PrefillConfig)]
    tried = 0
    for item, where in settings:
        if item.type not in (int, float, bool):
            continue
        for value in (1, 3, 500) if item.type is not bool else (True, False):
            tried += 1
            options = {"model": str(model), "device": "cpu", "distributed_executor_backend": "fake"}
            given = {where["group"]: {item.name: value}} if where else {item.name: value}
            try:
                core = build_engine_core(EngineConfig.from_options(**options, **given))
            except (ConfigError, CapacityError) as error:
                assert item.name in str(error), f"{item.name}={value}: {error}"  # noqa: PT017
            else:
                core.shutdown()
    assert tried >= 60


def test_configs_made_by_hand_count_what_differs_from_the_defaults_as_given(model: Path) -> None:
    by_hand = EngineConfig(ModelConfig(str(model)), scheduler=SchedulerConfig(max_num_batched_tokens=64))
    assert resolve_engine(by_hand).config.scheduler.max_num_seqs == 64


@pytest.mark.parametrize(("adaptive", "words"), [(True, "up to 3 tokens"), (False, "3 tokens")])
def test_the_log_of_the_start_says_how_it_drafts(
    model: Path, caplog: pytest.LogCaptureFixture, adaptive: bool, words: str
) -> None:
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=3, adaptive=adaptive)
    options = {"speculative_config": drafts, "distributed_executor_backend": "fake", "preemption_mode": "recompute"}
    with caplog.at_level(logging.INFO, "pagoda"):
        build_engine_core(config(model, num_blocks=20, max_model_len=64, **options)).shutdown()
    assert f"preemption: recompute, drafts: ngram, {words} per sequence" in caplog.text


def test_a_model_s_own_length_is_lowered_to_what_the_cache_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_llama(tmp_path)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 8192}))
    block = size_cache(resolve_engine(config(model, num_blocks=8192))).block_bytes
    options = {"kv_cache_memory": 201 * block, "distributed_executor_backend": "fake"}
    core = build_engine_core(config(model, **options))
    assert core.sizes.max_model_len == 200 * 8
    assert "max_model_len is lowered from 8192 to 1600" in caplog.text
    core.shutdown()
    with pytest.raises(CapacityError, match="max_model_len=1600 or less"):
        build_engine_core(config(model, **options, max_model_len=8192))
    with pytest.raises(CapacityError, match="set max_model_len="):
        build_engine_core(config(model, **{**options, "kv_cache_memory": 100 * block}))


def test_several_ranks_need_a_device_whose_tensors_they_can_share(model: Path) -> None:
    with pytest.raises(ConfigError, match="device='cuda' does not go with tensor_parallel_size"):
        resolve_engine(config(model, device="cuda", kernels="auto", tensor_parallel_size=2))


def test_server_options_are_not_engine_options() -> None:
    with pytest.raises(ConfigError, match="port is an option of `pagoda serve`, not of the engine"):
        EngineConfig.for_engine(port=8000)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.for_engine(quantisation=1)
    assert "did you mean 'quantization'" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.for_engine(zzz=1)
    assert "block_size" in str(caught.value)
    assert "port" not in str(caught.value)


def test_too_little_memory_names_what_would_fit(model: Path) -> None:
    setup = resolve_engine(config(model, kv_cache_memory=100_000))
    with pytest.raises(CapacityError) as caught:
        size_cache(setup)
    fits = int(str(caught.value).split("set max_model_len=")[1].split()[0])
    core = build_engine_core(config(model, kv_cache_memory=100_000, max_model_len=fits))
    assert core.sizes.num_blocks * 8 >= fits
    core.shutdown()


def test_it_answers_and_logs_its_settings_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagoda"):
        core = build_engine_core(config(model, num_blocks=20, max_model_len=64))
    assert sum("(20 blocks of 8," in record.message for record in caplog.records) == 1
    assert "prefix caching on, preemption: auto, drafts: none" in caplog.text
    assert (core.sizes.max_model_len, core.sizes.num_blocks, core.sizes.block_size) == (64, 20, 8)
    answers = drive(core, [request(0, [1, 5, 9], SamplingParams(temperature=0, max_tokens=5))])
    assert len(answers.tokens["r0", 0]) == 5
    core.shutdown()


def test_the_fake_backend_needs_no_weights(model: Path) -> None:
    core = build_engine_core(config(model, distributed_executor_backend="fake", num_blocks=20))
    answers = drive(core, [request(0, [1, 5, 9], SamplingParams(max_tokens=5))])
    assert len(answers.tokens["r0", 0]) == 5
    core.shutdown()


@pytest.mark.parametrize(("dtype", "quantization"), [("auto", "gguf"), ("float32", "none")])
def test_a_gguf_is_held_alike_by_all_who_resolve_its_settings(tmp_path: Path, dtype: str, quantization: str) -> None:
    """Ranks resolve the settings again that the engine resolved: an explicit dtype dequantises, a filled-in one not."""
    write_gguf(make_model("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    config = EngineConfig.for_engine(model=str(tmp_path / "model.gguf"), dtype=dtype)
    engine = resolve_engine(config)
    assert engine.config.model.quantization == quantization
    assert resolve_engine(engine.config).config.model.quantization == quantization


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32])
def test_a_gguf_of_floats_computes_in_their_type_but_float16_in_bfloat16_on_a_cpu(tmp_path: Path, kind: Kind) -> None:
    write_gguf(make_model("llama"), tmp_path / "model.gguf", kind)
    model, own = tmp_path / "model.gguf", {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[kind.name]
    on_cpu = "bfloat16" if kind is Kind.F16 else own
    assert (resolve_engine(config(model)).dtype, resolve_engine(config(model, device="cuda")).dtype) == (on_cpu, own)
    assert resolve_engine(config(model, dtype="float16")).dtype == "float16"


def test_weights_are_hashed_before_the_thread_that_computes_is_pinned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By threads that would be pinned with it: gigabytes at the speed of one core."""
    order: list[str] = []

    def hashed(files: ModelFiles) -> str:
        order.append("hash")
        return "digest"

    monkeypatch.setattr(assemble, "digest_of_weights", hashed)

    def wrap(inner: Executor, max_rows: int) -> Executor:
        order.append("executor")
        return inner

    build_engine_core(config(model, distributed_executor_backend="fake"), wrap_executor=wrap).shutdown()
    assert order == ["hash", "executor"]


@pytest.mark.parametrize("module", ["pagoda.assembly.engine_process", "pagoda.server.api_process", "pagoda.cli.main"])
def test_a_process_without_a_model_imports_neither_torch_nor_gguf(module: str) -> None:
    """torch takes 2 seconds and 190 MB: an API process does without, and so does an engine that only schedules.

    gguf is for models in its files alone.
    """
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'gguf'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
