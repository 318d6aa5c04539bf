"""Places of ranks, and settings that do not go with several of them."""

from typing import Any

import pytest

from pagoda.base.config import EngineConfig, ParallelConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.base.ranks import RankPlace


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_ranks_are_numbered_by_stage_and_the_first_of_the_last_stage_samples(tensor_size: int, num_stages: int) -> None:
    places = [RankPlace.of(number, tensor_size, num_stages) for number in range(tensor_size * num_stages)]
    assert [place.number for place in places] == list(range(places[0].world_size))
    assert [place.number for place in places if place.samples] == [tensor_size * (num_stages - 1)]
    assert [place.stage for place in places if place.is_first_stage] == [0] * tensor_size
    assert {place.stage for place in places if place.is_last_stage} == {num_stages - 1}


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ({}, "in_process"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"pipeline_parallel_size": 2}, "mp"),
        ({"distributed_executor_backend": "mp"}, "mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "ray"),
    ],
    ids=str,
)
def test_the_executor_follows_the_number_of_workers_unless_it_is_named(options: dict[str, Any], executor: str) -> None:
    assert ParallelConfig(**options).executor == executor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        (
            {"tensor_parallel_size": 8, "pipeline_parallel_size": 9},
            "tensor_parallel_size=8 times pipeline_parallel_size=9 makes 72 workers: at most 64",
        ),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "in_process"},
            "tensor_parallel_size=2 does not go with distributed_executor_backend='in_process'; take 'mp'",
        ),
        (
            {"pipeline_parallel_size": 2, "async_scheduling": True},
            "pipeline_parallel_size=2 does not go with async_scheduling yet; leave async_scheduling out",
        ),
        (
            {"tensor_parallel_size": 2, "speculative_config": {"method": "layer_skip"}},
            "tensor_parallel_size=2 does not go with speculative_config.method='layer_skip'",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_several_workers_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(EngineConfig.from_options(**options))
    assert message in str(caught.value)
