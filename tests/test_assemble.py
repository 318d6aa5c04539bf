"""Settings in, engine out: what is derived, and what is refused."""

import dataclasses
import logging
import typing
from pathlib import Path

import pytest

from pagoda.assemble import build_engine_core, resolve_engine, size_cache
from pagoda.base.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from pagoda.base.config_rules import AT_LEAST, WORDS
from pagoda.base.dtypes import DTYPE_BYTES
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.kernels import select
from pagoda.loading.fetch_hub import SOURCES
from tests.engine.driver import drive, request, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config(model: Path, **options: object) -> EngineConfig:
    base = {"device": "cpu", "threads": 1, "block_size": 8, "kernels": "torch"}
    return EngineConfig.from_options(model=str(model), **{**base, **options})


def test_what_is_left_open_is_derived(model: Path) -> None:
    setup = resolve_engine(config(model))
    assert setup.max_model_len == 512 == setup.config.model.max_model_len
    assert (setup.dtype, setup.kv_dtype, setup.device) == ("float32", "float32", "cpu")
    assert resolve_engine(config(model, dtype="bfloat16", kv_cache_dtype="int8")).kv_dtype == "int8"
    assert resolve_engine(config(model, kv_cache_dtype="bfloat16")).kv_dtype == "bfloat16"  # torch's kernels cast
    assert resolve_engine(config(model, max_model_len=100)).max_model_len == 100
    assert resolve_engine(setup.config) == setup  # resolving twice changes nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "max_model_len=513 must be in 1 .. 512"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens=255 is less than max_num_seqs=256"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 500}, "without chunked prefill"),
        ({"device": "cude"}, "did you mean 'cuda'"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'"),
        ({"block_size": 0}, "block_size=0"),
        ({"pipeline_depth": 0}, "pipeline_depth=0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"swap_space": -1.0}, "swap_space"),
        ({"watermark": 1.0}, "watermark"),
        ({"threads": 0}, "threads=0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"distributed_executor_backend": "in_proces"}, "did you mean 'in_process'"),
        ({"kv_cache_dtype": "bfloat16", "kernels": "auto"}, "kv_cache_dtype='bfloat16' with dtype='float32'"),
        ({"kv_cache_dtype": "float16", "kernels": "native"}, "take 'auto' or 'int8'"),
        ({"kernels": "nativ"}, "did you mean 'native'"),
        ({"source": "huggingfaces"}, "did you mean 'huggingface'"),
        ({"quantization": "int4"}, "did you mean 'int8'"),
        ({"revision": "main"}, "revision='main' is for hub models"),
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"num_host_blocks": -1}, "num_host_blocks=-1"),
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory='1GiB' must be an integer"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5 must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be an integer"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"watermark": float("nan")}, "watermark=nan"),
        ({"scheduler_delay_factor": -1.0}, "scheduler_delay_factor"),
        ({"max_logprobs": -1}, "max_logprobs=-1"),
        ({"preemption_mode": "swop"}, "preemption_mode='swop' is not one of"),
        ({"max_loras": 2}, "max_loras=2: LoRA adapters are not supported yet"),
        ({"num_speculative_tokens": 3}, "there is no drafter yet"),
        ({"encoder_budget": 3}, "there is no model with an encoder yet"),
        ({"port": 70000}, "port=70000"),
        ({"served_model_name": 5}, "served_model_name=5 must be texts"),
        ({"tokenizer": 5}, "tokenizer=5 must be a text"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(model: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_engine(config(model, **options))
    assert message in str(caught.value)


def test_every_number_of_the_settings_has_a_range_or_needs_none() -> None:
    """A new numeric field is named in the rules, or here with the place that judges it."""
    elsewhere = {"max_model_len", "seed", "prefix_hash_seed", "gpu_memory_utilization", "watermark"}
    for part in dataclasses.fields(EngineConfig):
        kind = type(getattr(EngineConfig(), part.name))
        numbers = {
            item.name for item in dataclasses.fields(kind) if {int, float} & {item.type, *typing.get_args(item.type)}
        }
        assert numbers - elsewhere == set(AT_LEAST.get(kind, {}))


def test_the_words_are_those_of_the_parts_that_read_them() -> None:
    assert set(WORDS[ParallelConfig]["kernels"]) == set(select.NAMES)
    assert set(WORDS[ModelConfig]["source"]) == set(SOURCES)
    assert set(WORDS[CacheConfig]["kv_cache_dtype"]) == {"auto", *DTYPE_BYTES}


def test_options_are_taken_as_people_write_them(model: Path) -> None:
    made = EngineConfig.from_options(model=model, served_model_name="tiny", api_keys=["a", "b"])
    assert made.model.model == str(model)
    assert (made.model.served_model_name, made.server.api_keys) == (("tiny",), ("a", "b"))


def test_too_little_memory_says_what_would_fit(model: Path) -> None:
    setup = resolve_engine(config(model, kv_cache_memory=100_000))
    with pytest.raises(CapacityError) as caught:
        size_cache(setup)
    fits = int(str(caught.value).split("set max_model_len=")[1].split()[0])
    core = build_engine_core(config(model, kv_cache_memory=100_000, max_model_len=fits))
    assert core.facts.num_blocks * 8 >= fits
    core.shutdown()


def test_it_answers_and_logs_its_settings_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagoda"):
        core = build_engine_core(config(model, num_blocks=20, max_model_len=64))
    assert sum("20 KV blocks of 8 tokens" in record.message for record in caplog.records) == 1
    assert (core.facts.max_model_len, core.facts.num_blocks, core.facts.block_size) == (64, 20, 8)
    answers = drive(core, [request(0, [1, 5, 9], SamplingParams(temperature=0, max_tokens=5))])
    assert len(answers.tokens["r0", 0]) == 5
    core.shutdown()


def test_the_fake_backend_needs_no_weights(model: Path) -> None:
    core = build_engine_core(config(model, distributed_executor_backend="fake", num_blocks=20))
    answers = drive(core, [request(0, [1, 5, 9], SamplingParams(max_tokens=5))])
    assert len(answers.tokens["r0", 0]) == 5
    core.shutdown()
