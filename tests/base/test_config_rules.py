"""Settings that were given and do nothing are reported by name, together with the setting that makes them useless."""

import logging
from typing import Any

import pytest

from pagoda import LLM
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import settings_without_effect


def found(**options: Any) -> list[str]:
    return settings_without_effect(EngineConfig.from_options(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory": 9}, "gpu_memory_utilization has no effect with kv_cache_m"),
        ({"kv_cache_memory": 9, "num_blocks": 4}, "kv_cache_memory has no effect with num_blocks=4"),
        ({"swap_space": 1, "preemption_mode": "recompute"}, "swap_space has no effect with preemption_mode=recompute"),
        ({"swap_space": 1, "num_host_blocks": 4}, "swap_space has no effect with num_host_blocks=4"),
        ({"preemption_mode": "swap"}, "preemption_mode has no effect as swap with swap_space=0"),
        ({"evict_for_priority": True}, "evict_for_priority has no effect with scheduling_policy=fcfs"),
        ({"prefix_hash_seed": 1, "enable_prefix_caching": False}, "prefix_hash_seed has no effect with enable_prefix"),
        (
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "long_prefill_token_threshold has no effect with enable_chunked_prefill off",
        ),
        (
            {"prefill.prefill_beside_decodes": 8, "scheduling_mode": "phased"},
            "prefill_beside_decodes has no effect with scheduling_mode=phased",
        ),
        (
            {"prefill": {"prefill_beside_decodes": 8}, "scheduling_mode": "phased"},
            "prefill_beside_decodes has no effect with scheduling_mode=phased",
        ),
        (
            {"enable_chunked_prefill": False, "scheduling_mode": "phased"},
            "enable_chunked_prefill has no effect with scheduling_mode=phased",
        ),
    ],
    ids=str,
)
def test_a_useless_setting_is_named_with_the_one_that_makes_it_so(options: dict[str, Any], message: str) -> None:
    assert [sentence[: len(message)] for sentence in found(**options)] == [message]


def test_only_what_was_given_is_reported() -> None:
    assert found() == []
    assert found(kv_cache_memory=9, scheduling_mode="phased", enable_prefix_caching=False) == []
    assert found(preemption_mode="swap", swap_space=1) == []
    assert found(preemption_mode="swap", num_host_blocks=4) == []
    assert found(evict_for_priority=True, scheduling_policy="priority") == []


def test_the_warning_appears_once_when_an_engine_starts(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"distributed_executor_backend": "fake", "num_blocks": 64, "max_model_len": 128}
    with caplog.at_level(logging.WARNING, "pagoda"), LLM(kv_cache_memory="1MiB", **options):
        pass
    assert [message for message in caplog.messages if "no effect" in message] == [
        "kv_cache_memory has no effect with num_blocks=64, which sizes the KV cache"
    ]
